"""Drafts from a counted suffix tree: the likeliest continuations of each suffix of the text that occurred before."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from parlay.drafters.stores.suffixes import Suffixes, chance
from parlay.types import NO_DRAFT, Draft, Tree


@dataclass(frozen=True, slots=True)
class SuffixDraft:
    """A tree of continuations.

    ``shares``: each node's count over the sum of its siblings' and its own, whether proposed or not. ``lengths``: how
    many tokens before each node matched. ``score``: the sum of the nodes' path probabilities, which are products of
    shares: the tokens that would be accepted on average if the text continued as it did before.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()
    score: float = 0.0

    def draft(self, source: str) -> Draft:
        if not self.tokens:
            return NO_DRAFT
        scores = tuple(map(chance, self.shares, self.lengths))
        return Draft(Tree(self.tokens, self.parents), sources=(source,) * len(self.tokens), scores=scores)


NOTHING = SuffixDraft()


@dataclass(frozen=True, slots=True)
class SuffixGrowth:
    """How drafts grow: to at most ``min(k, factor * match length + offset)`` nodes.

    Each has a path probability of at least ``min_prob``. With ``branching``, a node may have several children,
    otherwise only the likeliest. Nothing grows below ``stops``.
    """

    k: int
    factor: float
    offset: float
    min_prob: float
    branching: bool
    stops: Collection[int]

    def budget(self, match_length: int) -> int:
        return min(self.k, int(self.factor * match_length + self.offset))

    def match_length(self, shortest: int, longest: int, depth: int) -> int:
        """The longest match length from ``shortest`` to ``longest`` whose draft still fits into ``depth``."""
        while longest > shortest and longest + self.budget(longest) > depth:
            longest -= 1
        return longest


def speculate(suffixes: Suffixes, state: int, length: int, growth: SuffixGrowth, best: SuffixDraft) -> SuffixDraft:
    """The draft with the highest score after the state's substring of this length or one of its suffixes.

    ``best`` if none beats it; if scores are equal, the longer match wins.
    """
    for end, shortest, longest in suffixes.ends(state, length):
        if growth.budget(longest) <= best.score:
            break  # scores are at most the budget, and shorter matches have smaller budgets
        match_length = growth.match_length(shortest, longest, suffixes.depth)
        found = grow(suffixes, end, match_length, growth, best.score)
        if found is not None:
            best = found
    return best


def grow(suffixes: Suffixes, state: int, length: int, growth: SuffixGrowth, floor: float) -> SuffixDraft | None:
    """Grow a draft best first from ``state``, whose last ``length`` tokens match. None if it can't exceed ``floor``."""
    budget = growth.budget(length)
    plant = _GrowingDraft(suffixes, growth)
    plant.offer(state, length, 1.0, -1)
    while len(plant.tokens) < budget and plant.frontier:
        if plant.score - plant.frontier[0][0] * (budget - len(plant.tokens)) <= floor:
            return None
        plant.grow()
    if plant.score <= floor:
        return None
    tokens, parents = tuple(plant.tokens), tuple(plant.parents)
    return SuffixDraft(tokens, parents, tuple(plant.shares), tuple(plant.lengths), plant.score)


class _GrowingDraft:
    """A draft that grows: its nodes so far, and the continuations that may become nodes."""

    def __init__(self, suffixes: Suffixes, growth: SuffixGrowth) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.shares: list[float] = []
        self.lengths: list[int] = []
        self.score = 0.0
        self.frontier: list[tuple[float, int, int, int, float, int, int]] = []
        self._suffixes = suffixes
        self._growth = growth
        self._offered = 0

    def offer(self, state: int, length: int, path_prob: float, parent: int) -> None:
        """Add the children of a state as continuations; ``path_prob`` is the state's. Among equals, the first wins."""
        total, children = self._suffixes.frequent(state)
        if not self._growth.branching and children:
            children = [max(children, key=lambda child: child[1])]
        least = self._growth.min_prob * total / path_prob
        for token, count, target in children:
            if count >= least:
                self._offered += 1
                share = count / total
                offer = (-path_prob * share, self._offered, parent, token, share, target, length)
                heapq.heappush(self.frontier, offer)

    def grow(self) -> None:
        """Make the likeliest continuation a node, and add its children as continuations."""
        path_prob, _, parent, token, share, state, length = heapq.heappop(self.frontier)
        self.score -= path_prob
        self.tokens.append(token)
        self.parents.append(parent)
        self.shares.append(share)
        self.lengths.append(length)
        if length + 1 < self._suffixes.depth and token not in self._growth.stops:
            self.offer(state, length + 1, -path_prob, len(self.tokens) - 1)
