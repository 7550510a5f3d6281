"""Drafts out of a counted suffix tree: the likeliest continuations of each end of the text that occurred before."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from parlay.drafters.stores.suffixes import Suffixes, chance
from parlay.types import NO_DRAFT, Draft, Tree


@dataclass(frozen=True, slots=True)
class SuffixDraft:
    """A tree of continuations. ``shares`` are each node's count over that of all its siblings, proposed or not,
    ``lengths`` how many tokens before it matched.

    ``score`` is the sum of the nodes' path probabilities, which are products of shares: the tokens that would be
    accepted on average if the text went on as it did before.
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
    """How drafts grow: at most ``min(k, factor * match length + offset)`` nodes, each of at least ``min_prob``
    path probability; ``branching`` or only the likeliest child of each node. Nothing grows below ``stops``.
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
        """The longest of the ends followed by the same texts that leaves a chain of its budget room in the depth."""
        while longest > shortest and longest + self.budget(longest) > depth:
            longest -= 1
        return longest


def speculate(suffixes: Suffixes, state: int, length: int, growth: SuffixGrowth, best: SuffixDraft) -> SuffixDraft:
    """The speculation of highest score after the state's substring of that length or one of its ends, if it beats
    ``best``; ties go to the longer.
    """
    for end, shortest, longest in suffixes.ends(state, length):
        if growth.budget(longest) <= best.score:
            break  # no path probability is above 1, and shorter matches have smaller budgets
        match_length = growth.match_length(shortest, longest, suffixes.depth)
        found = grow(suffixes, end, match_length, growth, best.score)
        if found is not None:
            best = found
    return best


def grow(suffixes: Suffixes, state: int, length: int, growth: SuffixGrowth, floor: float) -> SuffixDraft | None:
    """Best first from ``state``, whose ``length`` latest tokens match; None as soon as ``floor`` can't be exceeded."""
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
    """A draft that grows: its nodes so far, and the continuations of them that may become nodes."""

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
        """The children of a state whose path has probability ``path_prob``. Of equal ones the first seen wins."""
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
        """The likeliest continuation becomes a node, and its children are offered."""
        path_prob, _, parent, token, share, state, length = heapq.heappop(self.frontier)
        self.score -= path_prob
        self.tokens.append(token)
        self.parents.append(parent)
        self.shares.append(share)
        self.lengths.append(length)
        if length + 1 < self._suffixes.depth and token not in self._growth.stops:
            self.offer(state, length + 1, -path_prob, len(self.tokens) - 1)
