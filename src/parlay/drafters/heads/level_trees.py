"""Trees that a head grows level by level: which nodes it runs next, and which become the draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from parlay.drafters.draft_models.guesses import Guess
from parlay.drafters.draft_models.static_trees import FilledTree, StaticTree
from parlay.types import Draft, Tree


class LevelTree(ABC):
    """``ran`` are the nodes that the head has run, in order; ``newest`` of them ran last or run next.

    At first that is the root, -1.
    """

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.newest: list[int] = [-1]

    @abstractmethod
    def token(self, node: int) -> int:
        """Token of an offered node."""

    @abstractmethod
    def parent(self, node: int) -> int:
        """The node above."""

    @abstractmethod
    def offer(self, children: Sequence[Sequence[Guess]]) -> None:
        """Children of each of the newest nodes: tokens with the head's probabilities of them."""

    @abstractmethod
    def draft(self, budget: int, source: str) -> Draft:
        """At most ``budget`` nodes."""

    @abstractmethod
    def _next(self) -> list[int]:
        """Which of the nodes offered last run next."""

    def expand(self) -> bool:
        """Choose the nodes that run next; whether there are any."""
        self.newest = self._next()
        self.ran += self.newest
        return bool(self.newest)

    def rows(self) -> Tree:
        """The nodes that ran or run next, as a tree of their own."""
        place = {node: index for index, node in enumerate(self.ran)} | {-1: -1}
        return Tree(tuple(map(self.token, self.ran)), tuple([place[self.parent(node)] for node in self.ran]))

    def rows_above(self, level: Sequence[int]) -> list[int]:
        """Where in ``level``, the nodes of the level before, the parent of each of the newest nodes is."""
        place = {node: index for index, node in enumerate(level)}
        return [place[self.parent(node)] for node in self.newest]

    def path_tokens(self, node: int) -> list[int]:
        """From below the root down to the node."""
        path: list[int] = []
        while node >= 0:
            path.append(self.token(node))
            node = self.parent(node)
        return path[::-1]


class RankTree(LevelTree):
    """A tree whose shape is fixed beforehand: which rank of guess stands where (Li et al. 2024, EAGLE)."""

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
        """The whole tree: its shape was chosen for the budget."""
        return self._filled.draft(source)

    def _next(self) -> list[int]:
        self._levels += 1
        return self._filled.inner(self._levels)
