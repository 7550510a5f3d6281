"""Simulates drafting: which drafted tokens are right, and how many tokens each step commits.

Whether a drafted token is right depends only on the seed, the request, and the token's place in the answer. It does not
depend on the step that verifies the token, the server, or the strategy. Simulations of different fleets and strategies
so have common random numbers (Law, Simulation Modeling and Analysis, chapter 11): their differences vary less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parlay.cost.speed import best_tree, children

DraftSeconds = Callable[[int, int, float], float]
"""Seconds of drafting in a step, by number of sequences, nodes of each sequence's draft, and mean context tokens."""


def no_seconds(sequences: int, nodes: int, context: float) -> float:
    """Return 0: the `DraftSeconds` of drafts that are looked up, which takes no time worth counting."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Drafting:
    """A strategy, simulated: drafts of at most ``nodes`` nodes.

    ``ranks`` are the probabilities that drafted nodes are right, by kind of text, as `parlay.cost.speed.best_tree`
    takes them. A kind without an entry uses the entry of ``""``. With ``adapts``, each step drafts the number of nodes
    with the most tokens per second. Otherwise it drafts ``nodes``.
    """

    name: str = "none"
    nodes: int = 0
    ranks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    adapts: bool = True
    seconds: DraftSeconds = no_seconds

    def chances(self, kind: str) -> tuple[float, ...]:
        """Return the ``ranks`` of a kind of text."""
        return self.ranks.get(kind) or self.ranks.get("") or (0.0,)

    def tokens(self, kind: str) -> list[float]:
        """Return the mean tokens that a step commits with drafts of 0, 1, 2, ... ``nodes`` nodes."""
        return [best_tree(self.chances(kind), size).tokens for size in range(self.nodes + 1)]


PLAIN = Drafting()


def uniforms(seed: int, request: int, tokens: int) -> NDArray[np.float64]:
    """Return for each place of an answer of ``tokens`` tokens a number from 0 to 1, evenly distributed.

    A drafted token that is right with probability p is right where the number is below p. The numbers of a longer
    answer begin with those of a shorter one. The counter-based generator Philox (Salmon et al. 2011) draws them: its
    key is the seed and the number of the request.
    """
    key = np.array([seed % (1 << 64), request], np.uint64)
    drawn: NDArray[np.float64] = np.random.Generator(np.random.Philox(key=key)).random(tokens)
    return drawn


class Drafts:
    """The drafts of one kind of text, of all sizes: which tokens are right, given the `uniforms` of a request."""

    def __init__(self, chances: Sequence[float]) -> None:
        self._chances = chances
        self._bounds = np.cumsum(chances)
        self._trees: dict[int, list[list[int]]] = {}

    def right(self, numbers: NDArray[np.float64]) -> list[int]:
        """Return for each place the rank of the drafted token that is right there, or the number of ranks if none
        is."""
        ranks: list[int] = self._bounds.searchsorted(numbers, side="right").tolist()
        return ranks

    def path(self, right: Sequence[int], nodes: int, written: int) -> list[int]:
        """Return ``written``, and after it the number of written tokens after each step to the end of the answer.

        Each step drafts ``nodes`` nodes, or less if the answer ends before. It commits the accepted ones and a token
        more. ``right`` is the result of `right`, with an entry for each token of the answer.
        """
        tree = self._trees.get(nodes)
        if tree is None:
            tree = self._trees[nodes] = children(self._chances, nodes)
        found, last = [written], len(right) - 1
        while written <= last:
            node = 0
            while written < last and (node := tree[node][right[written]]):
                written += 1
            written += 1
            found.append(written)
        return found
