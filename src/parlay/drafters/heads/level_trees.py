"""Trees that a head grows level by level, and the guesses that they grow from.

A tree has a fixed shape, grows where the head is surest (Li et al. 2024, EAGLE-2), or holds the beams of a search
(Zhang et al. 2024).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from torch import Tensor

from parlay.drafters.draft_models.guesses import Guess
from parlay.drafters.draft_models.static_trees import FilledTree, StaticTree
from parlay.drafters.heads.copies import raise_copies
from parlay.sampling import noise, select
from parlay.types import NO_DRAFT, Draft, SequenceView, Tree


class LevelTree(ABC):
    """A tree that grows level by level. ``ran``: the nodes that the head has run or runs next, in order.

    ``newest``: those of them that ran last or run next; at first the root, -1.
    """

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.newest: list[int] = [-1]

    @abstractmethod
    def token(self, node: int) -> int:
        """The token of an offered node."""

    @abstractmethod
    def parent(self, node: int) -> int:
        """The node's parent; -1 is the root."""

    @abstractmethod
    def offer(self, children: Sequence[Sequence[Guess]]) -> None:
        """Add children of each of the newest nodes: tokens with the head's probabilities."""

    @abstractmethod
    def draft(self, budget: int, source: str) -> Draft:
        """A draft of at most ``budget`` nodes."""

    @abstractmethod
    def _next(self, ends: Collection[int]) -> list[int]:
        """The nodes of the latest level to run next, except those whose token is in ``ends``, which end the text."""

    def expand(self, ends: Collection[int]) -> bool:
        """Choose the nodes to run next. Returns whether there are any. Tokens of ``ends`` are never run."""
        self.newest = self._next(ends)
        self.ran += self.newest
        return bool(self.newest)

    def rows(self) -> Tree:
        """The nodes that ran or run next, as a tree of their own."""
        place = {node: index for index, node in enumerate(self.ran)} | {-1: -1}
        return Tree(tuple(map(self.token, self.ran)), tuple([place[self.parent(node)] for node in self.ran]))

    def rows_above(self, level: Sequence[int]) -> list[int]:
        """For each of the newest nodes, the index of its parent in ``level``, the nodes of the level before."""
        place = {node: index for index, node in enumerate(level)}
        return [place[self.parent(node)] for node in self.newest]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from below the root down to the node."""
        path: list[int] = []
        while node >= 0:
            path.append(self.token(node))
            node = self.parent(node)
        return path[::-1]


class RankTree(LevelTree):
    """A tree with a fixed shape, which says the rank of the guess at each node (Li et al. 2024, EAGLE)."""

    def __init__(self, shape: StaticTree) -> None:
        super().__init__()
        self._filled = FilledTree(shape)
        self._levels = 0

    def token(self, node: int) -> int:
        return self._filled.token(node)

    def parent(self, node: int) -> int:
        return self._filled.parent(node)

    def offer(self, children: Sequence[Sequence[Guess]]) -> None:
        for node, found in zip(self.newest, children, strict=True):
            self._filled.fill(node, found)

    def draft(self, budget: int, source: str) -> Draft:
        """The whole tree, whose shape was chosen for the budget."""
        return self._filled.draft(source)

    def _next(self, ends: Collection[int]) -> list[int]:
        self._levels += 1
        return [node for node in self._filled.inner(self._levels) if self.token(node) not in ends]


class DynamicTree(LevelTree):
    """A tree in which each level runs the ``width`` likeliest candidates of the level before, which offer children.

    Paths below ``min_p`` are not offered, and a node does not run if none of its descendants could be in a draft of
    ``budget`` nodes. A path's probability is the product of its nodes'.
    """

    def __init__(self, width: int, min_p: float, budget: int) -> None:
        super().__init__()
        self._width, self._min_p, self._budget = width, min_p, budget
        self._tokens: list[int] = []  # tokens of all candidates, in the order in which they were offered
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._path_probs: list[float] = []
        self._offered = 0  # the first candidate of the latest level

    def token(self, node: int) -> int:
        return self._tokens[node]

    def parent(self, node: int) -> int:
        return self._parents[node]

    def offer(self, children: Sequence[Sequence[Guess]]) -> None:
        self._offered = len(self._tokens)
        for node, guesses in zip(self.newest, children, strict=True):
            above = self._path_probs[node] if node >= 0 else 1.0
            for token, probability in guesses:
                if above * probability >= self._min_p:
                    self._tokens.append(token)
                    self._parents.append(node)
                    self._scores.append(probability)
                    self._path_probs.append(above * probability)

    def draft(self, budget: int, source: str) -> Draft:
        """The ``budget`` likeliest candidates. Each has its parent, which is likelier or came earlier."""
        return self._draft(sorted(sorted(range(len(self._tokens)), key=self._order)[:budget]), source)

    def _draft(self, nodes: Sequence[int], source: str) -> Draft:
        """Make a draft of these candidates, each after its parent."""
        if not nodes:
            return NO_DRAFT
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        tree = Tree(
            tuple([self._tokens[node] for node in nodes]), tuple([place[self._parents[node]] for node in nodes])
        )
        return Draft(tree, sources=(source,) * len(nodes), scores=tuple([self._scores[node] for node in nodes]))

    def _next(self, ends: Collection[int]) -> list[int]:
        worst = self._worst_drafted()
        latest = [
            node
            for node in range(self._offered, len(self._tokens))
            if self._path_probs[node] > worst and self._tokens[node] not in ends
        ]
        return sorted(sorted(latest, key=self._order)[: self._width])

    def _worst_drafted(self) -> float:
        """The probability of the least likely path in the draft; 0 while the draft would hold all candidates."""
        best = sorted(self._path_probs, reverse=True)[: self._budget]
        return best[-1] if len(best) == self._budget else 0.0

    def _order(self, node: int) -> tuple[float, int]:
        return -self._path_probs[node], node


class BeamTree(DynamicTree):
    """Beam search: each level keeps the ``width`` likeliest paths. The draft merges the beams that remain at the end.

    A path that ends the text is kept like the others; otherwise the draft would lose it.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 0.0, 0)

    def _worst_drafted(self) -> float:
        return 0.0  # beams compete only within their level

    def _next(self, ends: Collection[int]) -> list[int]:
        return super()._next(())

    def draft(self, budget: int, source: str) -> Draft:
        """Merge beams, the likeliest first, up to the budget; the last one may be cut."""
        kept: set[int] = set()
        for leaf in sorted(self._next(()), key=self._order):
            path = []
            node = leaf
            while node >= 0 and node not in kept:
                path.append(node)
                node = self.parent(node)
            kept.update(path[::-1][: budget - len(kept)])
        return self._draft(sorted(kept), source)


class Guessing:
    """Ranks a head's guesses. ``ids_D``: the target's token for each draft id.

    If a request samples, its known noise helps to decide what the target writes, so only the target's logits must be
    guessed. A token's probability is the softmax of the head's logits plus temperature times noise. It is as accurate
    as the head's logits, at any temperature; without noise it is the head's own probability. Penalties and truncation
    are left to the target.

    With ``copies``, tokens that followed the same tokens earlier in the text are favoured.
    """

    def __init__(self, ids_D: Tensor, *, copies: bool = False) -> None:
        self._ids_D, self._copies = ids_D, copies

    def best(
        self, logits_RD: Tensor, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], width: int
    ) -> list[list[Guess]]:
        """For each row, the ``width`` likeliest tokens and their probabilities. The logits may change."""
        if self._copies:
            raise_copies(logits_RD, self._ids_D, [view.tokens for view in views], paths)
        noisy_RD = self._with_noise(logits_RD, views, paths)
        if width == 1:  # a much faster way
            top_R, best_R = select.argmax(noisy_RD)
            chances = (noisy_RD - top_R[:, None]).exp_().sum(-1).reciprocal_().tolist()
            return [[guess] for guess in zip(self._ids_D[best_R].tolist(), chances, strict=True)]
        best_RW = noisy_RD.softmax(-1).topk(min(width, logits_RD.shape[-1]))
        ids_RW = self._ids_D[best_RW.indices].tolist()
        return [list(zip(*row, strict=True)) for row in zip(ids_RW, best_RW.values.tolist(), strict=True)]

    def _with_noise(self, logits_RD: Tensor, views: Sequence[SequenceView], paths: Sequence[Sequence[int]]) -> Tensor:
        temperatures = [view.request.params.temperature for view in views]
        if not any(temperatures):
            return logits_RD
        streams = [
            noise.stream(view.request.key, len(view.tokens) + len(path))
            for view, path in zip(views, paths, strict=True)
        ]
        noise_RD = noise.gumbel(noise.bits(streams, self._ids_D))
        return logits_RD + noise_RD.mul_(noise_RD.new_tensor(temperatures)[:, None]).to(logits_RD.dtype)
