"""Trees that grow where the head is surest (Li et al. 2024, EAGLE-2): expand the best, then keep the best of all."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.types import NO_DRAFT, Draft, Tree


class DynamicTree:
    """Each level runs the ``width`` likeliest candidates of the level before, and each of them offers children.

    ``ran`` are the nodes that the head has run, in order; ``newest`` of them ran last or run next. Nothing below
    ``min_p`` is offered. A path's probability is the product of its nodes'.
    """

    def __init__(self, width: int, min_p: float) -> None:
        self._width, self._min_p = width, min_p
        self._tokens: list[int] = []  # of all candidates, in the order in which they were offered
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._path_probs: list[float] = []
        self.ran: list[int] = []
        self.newest: list[int] = [-1]  # at first the root
        self._offered = 0  # the first candidate of the latest level

    def offer(self, children: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Children of each of the newest nodes: tokens with the head's probabilities of them."""
        self._offered = len(self._tokens)
        for node, guesses in zip(self.newest, children, strict=True):
            above = self._path_probs[node] if node >= 0 else 1.0
            for token, probability in guesses:
                if above * probability >= self._min_p:
                    self._tokens.append(token)
                    self._parents.append(node)
                    self._scores.append(probability)
                    self._path_probs.append(above * probability)

    def expand(self) -> bool:
        """Choose the nodes that run next; whether there are any."""
        latest = range(self._offered, len(self._tokens))
        self.newest = sorted(sorted(latest, key=self._order)[: self._width])
        self.ran += self.newest
        return bool(self.newest)

    def rows(self) -> Tree:
        """The nodes that ran or run next, as a tree of their own."""
        place = {node: index for index, node in enumerate(self.ran)}
        place[-1] = -1
        return Tree(
            tuple([self._tokens[node] for node in self.ran]), tuple([place[self._parents[node]] for node in self.ran])
        )

    def rows_above(self, level: Sequence[int]) -> list[int]:
        """Where in ``level``, the nodes of the level before, the parent of each of the newest nodes is."""
        place = {node: index for index, node in enumerate(level)}
        return [place[self._parents[node]] for node in self.newest]

    def path_tokens(self, node: int) -> list[int]:
        """From below the root down to the node."""
        path: list[int] = []
        while node >= 0:
            path.append(self._tokens[node])
            node = self._parents[node]
        return path[::-1]

    def draft(self, budget: int, source: str) -> Draft:
        """The ``budget`` likeliest of all candidates: a node's parent is likelier or came earlier, so it is there."""
        best = sorted(sorted(range(len(self._tokens)), key=self._order)[:budget])
        if not best:
            return NO_DRAFT
        place = {node: index for index, node in enumerate(best)}
        place[-1] = -1
        tree = Tree(tuple([self._tokens[node] for node in best]), tuple([place[self._parents[node]] for node in best]))
        return Draft(tree, sources=(source,) * len(best), scores=tuple([self._scores[node] for node in best]))

    def _order(self, node: int) -> tuple[float, int]:
        return -self._path_probs[node], node
