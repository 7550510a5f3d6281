"""Trees that grow where the head is surest (Li et al. 2024, EAGLE-2), and beam search (Zhang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.draft_models.guesses import Guess
from parlay.drafters.heads.level_trees import LevelTree
from parlay.types import NO_DRAFT, Draft, Tree


class DynamicTree(LevelTree):
    """Each level runs the ``width`` likeliest candidates of the level before, and each of them offers children.

    Nothing below ``min_p`` is offered, and nothing runs below which no node could be in a draft of ``budget`` nodes. A
    path's probability is the product of its nodes'.
    """

    def __init__(self, width: int, min_p: float, budget: int) -> None:
        super().__init__()
        self._width, self._min_p, self._budget = width, min_p, budget
        self._tokens: list[int] = []  # of all candidates, in the order in which they were offered
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
        """The ``budget`` likeliest of all candidates: a node's parent is likelier or came earlier, so it is there."""
        return self._draft(sorted(sorted(range(len(self._tokens)), key=self._order)[:budget]), source)

    def _draft(self, nodes: Sequence[int], source: str) -> Draft:
        """Make the draft of these candidates; each comes after its parent."""
        if not nodes:
            return NO_DRAFT
        place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
        tree = Tree(
            tuple([self._tokens[node] for node in nodes]), tuple([place[self._parents[node]] for node in nodes])
        )
        return Draft(tree, sources=(source,) * len(nodes), scores=tuple([self._scores[node] for node in nodes]))

    def _next(self) -> list[int]:
        worst = self._worst_drafted()
        latest = [node for node in range(self._offered, len(self._tokens)) if self._path_probs[node] > worst]
        return sorted(sorted(latest, key=self._order)[: self._width])

    def _worst_drafted(self) -> float:
        """The least likely path in the draft; 0 while it would hold all candidates."""
        best = sorted(self._path_probs, reverse=True)[: self._budget]
        return best[-1] if len(best) == self._budget else 0.0

    def _order(self, node: int) -> tuple[float, int]:
        return -self._path_probs[node], node


class BeamTree(DynamicTree):
    """Beam search: each level keeps the ``width`` likeliest paths. The draft merges those that are left at the end."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 0.0, 0)

    def _worst_drafted(self) -> float:
        return 0.0  # each level's beams stand for themselves

    def draft(self, budget: int, source: str) -> Draft:
        """The beams from the likeliest on, as long as there is room; the last of them may be cut."""
        kept: set[int] = set()
        for leaf in sorted(self._next(), key=self._order):
            path = []
            node = leaf
            while node >= 0 and node not in kept:
                path.append(node)
                node = self.parent(node)
            kept.update(path[::-1][: budget - len(kept)])
        return self._draft(sorted(kept), source)
