"""The exact accept rule: samples each token as plain decoding does, and follows the tree while it has that token."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import ClassVar

from torch import Tensor

from parlay.sampling import fused_walk
from parlay.sampling.sampler import greedy, is_batchable, is_plain_greedy, is_read_in_one_pass, sample, take_rows
from parlay.types import AcceptRule, Draft, DraftKind, Exactness, Fault, SequenceView, Tree, Verdict, trees


@dataclass(frozen=True)
class SharedNoise:
    """Commits the tokens that plain decoding commits, whatever is drafted. It is as exact as the runner's logits."""

    exactness: ClassVar[Exactness] = Exactness.BITS
    kinds: ClassVar[frozenset[DraftKind]] = frozenset({"point"})

    def matches(self, view: SequenceView) -> bool:
        """See `AcceptRule.matches`."""
        return True

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        """See `AcceptRule.accept`. Raises ValueError for a draft that was drawn from a distribution."""
        for draft in drafts:
            if draft.kind != "point":
                check_kind(self, draft)
        return follow(views, drafts, logits_RV, roots)


def follow(
    views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
) -> list[Verdict | Fault]:
    """The tokens of plain decoding, as far as the drafts have them, however the drafts were chosen."""
    if not fused_walk.runs_on(logits_RV):
        return _by_sampler(views, drafts, logits_RV, roots)
    verdicts: dict[int, Verdict | Fault] = {}
    here = [place for place, view in enumerate(views) if fused_walk.takes(view)]
    if here:
        found = fused_walk.follow(*_of(here, views, drafts), logits_RV, [roots[place] for place in here])
        verdicts |= {place: verdict for place, verdict in zip(here, found, strict=True) if verdict is not None}
    rest = [place for place in range(len(views)) if place not in verdicts]
    if rest:
        chosen = _by_sampler(*_of(rest, views, drafts), logits_RV, [roots[place] for place in rest])
        verdicts |= dict(zip(rest, chosen, strict=True))
    return [verdicts[place] for place in range(len(views))]


def _of(
    places: Sequence[int], views: Sequence[SequenceView], drafts: Sequence[Draft]
) -> tuple[list[SequenceView], list[Draft]]:
    return [views[place] for place in places], [drafts[place] for place in places]


def _by_sampler(
    views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
) -> list[Verdict | Fault]:
    """`follow` with the sampler, one row or several rows at a time."""
    greedily = [is_plain_greedy(view, ()) for view in views]
    if all(greedily):
        return _greedily(drafts, logits_RV, roots)
    lockstep = [place for place, plain in enumerate(greedily) if not plain]
    walks = {place: _Walk(views[place], drafts[place], roots[place]) for place in lockstep}
    _walk_in_lockstep(list(walks.values()), logits_RV)
    plain = [place for place in range(len(views)) if place not in walks]
    verdicts: dict[int, Verdict | Fault] = {place: walk.verdict for place, walk in walks.items()}
    if plain:
        chosen = _greedily([drafts[place] for place in plain], logits_RV, [roots[place] for place in plain])
        verdicts.update(zip(plain, chosen, strict=True))
    return [verdicts[place] for place in range(len(views))]


def check_kind(rule: AcceptRule, draft: Draft) -> None:
    """Raises ValueError for a draft that the rule can't handle."""
    if (draft.kind == "point" and "point" in rule.kinds) or not len(draft):
        return
    if draft.kind not in rule.kinds:
        raise ValueError(
            f"accept rule {type(rule).__name__} can't judge drafts of kind {draft.kind!r}; "
            f"it takes {sorted(rule.kinds)}"
        )
    if draft.kind != "point" and draft.probs is None:
        raise ValueError(f"accept rule {type(rule).__name__} needs the distribution that each node was drawn from")


def _greedily(drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]) -> list[Verdict | Fault]:
    """Verdicts of greedy requests: one argmax over all rows costs less than one for each visited row."""
    return follow_tokens(drafts, tuple(greedy(logits_RV)), roots)


def follow_tokens(
    drafts: Sequence[Draft], tokens: Sequence[int | Fault], roots: Sequence[int]
) -> list[Verdict | Fault]:
    """Follow each draft by the ``tokens`` that were chosen at all rows of a forward; ``roots`` are the roots' rows."""
    return [
        _verdict(draft.tree, tokens[root : root + 1 + len(draft.tree.tokens) - draft.probes])
        for draft, root in zip(drafts, roots, strict=True)
    ]


def _verdict(tree: Tree, tokens: Sequence[int | Fault]) -> Verdict | Fault:
    """Follow the tree by ``tokens``: those chosen at the root and at each node except probes."""
    path = _path(tree, tokens)
    last, drafted = tokens[path[-1] + 1 if path else 0], trees.along(tree.tokens, path)
    if not isinstance(last, Fault):
        return Verdict(path, (*drafted, last))
    # Earlier tokens stay valid, as in plain decoding. The next step meets the fault at its root.
    return Verdict(path[:-1], drafted) if path else last


def _path(tree: Tree, tokens: Sequence[int | Fault]) -> tuple[int, ...]:
    """The nodes whose tokens were chosen, from the root down."""
    if len(tokens) == 1:
        return ()
    if trees.is_chain(tree):
        return tuple(range([*map(operator.ne, tree.tokens, tokens[:-1]), True].index(True)))
    places: Iterable[tuple[int, int | Fault]] = zip(tree.parents, tree.tokens, strict=True)
    children = dict(zip(places, range(len(tokens) - 1), strict=False))  # without probes, which are the last
    path: list[int] = []
    here = -1
    while (below := children.get((here, tokens[here + 1]))) is not None:
        path.append(below)
        here = below
    return tuple(path)


class _Walk:
    """One sequence's walk down its tree, without probes."""

    __slots__ = ("_chain", "_children", "_fault", "_most", "_node", "_path", "open", "root", "sampled", "view")

    def __init__(self, view: SequenceView, draft: Draft, root: int) -> None:
        self.view = view
        self.root = root
        self.sampled: list[int] = []
        self.open = True
        self._path: list[int] = []
        self._node = -1
        self._fault: Fault | None = None
        real = len(draft) - draft.probes
        nodes = zip(draft.tree.parents[:real], draft.tree.tokens[:real], range(real), strict=True)
        self._children = {(parent, token): node for parent, token, node in nodes}
        self._chain = draft.tree.tokens[:real] if trees.is_chain(draft.tree) else ()
        self._most = 1 + max(1, _likely(draft.scores[:real]))

    def ahead(self, *, alone: bool) -> list[tuple[int, list[int]]]:
        """The row of logits to sample next, with its path; then rows below it, as long as the tree has no branches.

        With ``alone``, which means that sampling rows together is not cheaper, only one row. Otherwise as many as the
        drafter's scores make likely, and twice as many with each call.
        """
        path, first = list(self.sampled), self.root + 1 + self._node
        below = self._chain[self._node + 1 :][: self._most - 1] if not alone and is_batchable(self.view, path) else ()
        self._most *= 2
        return [(first + depth, [*path, *below[:depth]]) for depth in range(len(below) + 1)]

    @property
    def verdict(self) -> Verdict | Fault:
        return self._fault or Verdict(tuple(self._path), tuple(self.sampled))

    def take(self, token: int | Fault) -> None:
        """Go down to the child with this token. If there is none, the token is the walk's last."""
        if isinstance(token, Fault):
            # Earlier tokens stay valid, as in plain decoding. The next step meets the fault at its root.
            if self._path:
                self._path.pop()
            else:
                self._fault = token
            self.open = False
            return
        self.sampled.append(token)
        node = self._children.get((self._node, token))
        if node is None:
            self.open = False
            return
        self._path.append(node)
        self._node = node


def _walk_in_lockstep(walks: list[_Walk], logits_RV: Tensor) -> None:
    """Walk all sequences together, one or several levels at a time; see `_Walk.ahead`.

    Only rows that are visited, or are likely to be, are processed.
    """
    alone = is_read_in_one_pass(logits_RV)
    while walks:
        runs = [walk.ahead(alone=alone) for walk in walks]
        chosen = [row for run in runs for row, _ in run]
        views = [walk.view for walk, run in zip(walks, runs, strict=True) for _ in run]
        tokens = iter(sample(take_rows(logits_RV, chosen), views, [path for run in runs for _, path in run]))
        for walk, run in zip(walks, runs, strict=True):
            for token in islice(tokens, len(run)):
                if walk.open:
                    walk.take(token)
        walks = [walk for walk in walks if walk.open]


def _likely(scores: Sequence[float]) -> int:
    """How many levels of a chain are reached with a probability of at least one half."""
    return sum(reach >= 0.5 for reach in accumulate(scores, operator.mul))
