"""The exact accept rule: draw each token with the one sampler and follow the tree for as long as it has that token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from parlay.sampling.sampler import greedy, is_plain_greedy, rows, sample
from parlay.types import Draft, Exactness, Fault, Law, Rule, Verdict, View


@dataclass(frozen=True)
class SharedNoise:
    """Commits the very tokens that plain decoding commits, whatever is drafted: as exact as the runner's logits are."""

    exactness: ClassVar[Exactness] = Exactness.BITS
    laws: ClassVar[frozenset[Law]] = frozenset({"point"})

    def accept(
        self, views: Sequence[View], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        """See `Rule.accept`. Raises ValueError for a draft that was drawn rather than guessed."""
        for draft in drafts:
            check_law(self, draft)
        return follow(views, drafts, logits_RV, roots)


def follow(
    views: Sequence[View], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
) -> list[Verdict | Fault]:
    """Plain decoding's tokens for as long as the drafts carry them, by whatever law these were chosen."""
    walks = [_Walk(view, draft, root) for view, draft, root in zip(views, drafts, roots, strict=True)]
    plain = [walk for walk in walks if is_plain_greedy(walk.view, ())]
    if plain:
        _walk_greedily(plain, logits_RV)
    _walk_in_lockstep([walk for walk in walks if walk.open], logits_RV)
    return [walk.verdict for walk in walks]


def check_law(rule: Rule, draft: Draft) -> None:
    """Raises ValueError for a draft that the rule can't judge."""
    if len(draft) and draft.law not in rule.laws:
        raise ValueError(
            f"accept rule {type(rule).__name__} can't judge drafts of law {draft.law!r}; it takes {sorted(rule.laws)}"
        )
    if len(draft) and draft.law != "point" and draft.probs is None:
        raise ValueError(f"accept rule {type(rule).__name__} needs the law that each node was drawn from")


class _Walk:
    """One sequence's way down its tree. Probes are not part of it."""

    __slots__ = ("_children", "_fault", "_node", "_path", "open", "root", "sampled", "view")

    def __init__(self, view: View, draft: Draft, root: int) -> None:
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

    @property
    def row(self) -> int:
        """The row of logits to draw from next."""
        return self.root + 1 + self._node

    @property
    def verdict(self) -> Verdict | Fault:
        return self._fault or Verdict(tuple(self._path), tuple(self.sampled))

    def take(self, token: int | Fault) -> None:
        """Descend to the child that carries the token; without one, it is the correction or bonus and the walk ends."""
        if isinstance(token, Fault):
            # Tokens drawn above stand, as in plain decoding: the last is then the bonus, and the fault the next root's.
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

    def descend(self, tokens: Sequence[int | Fault]) -> None:
        """All the way, by the tokens that the rows of logits choose."""
        first, children, sampled, path, node = self.root + 1, self._children, self.sampled, self._path, self._node
        while isinstance(token := tokens[first + node], int):
            sampled.append(token)
            below = children.get((node, token))
            if below is None:
                self.open = False
                return
            path.append(below)
            self._node = node = below
        self.take(token)


def _walk_greedily(walks: Sequence[_Walk], logits_RV: Tensor) -> None:
    """Where the largest logit decides, one argmax over all rows costs less than one per visited row."""
    tokens = greedy(logits_RV)
    for walk in walks:
        walk.descend(tokens)


def _walk_in_lockstep(walks: list[_Walk], logits_RV: Tensor) -> None:
    """Level by level over all sequences, so that only visited rows are processed, each on its own path."""
    while walks:
        chosen = [walk.row for walk in walks]
        tokens = sample(rows(logits_RV, chosen), [walk.view for walk in walks], [walk.sampled for walk in walks])
        for walk, token in zip(walks, tokens, strict=True):
            walk.take(token)
        walks = [walk for walk in walks if walk.open]
