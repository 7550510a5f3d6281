"""Drafts from a counted suffix tree: the likeliest continuations of each suffix of the text that occurred before."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection
from typing import NamedTuple

from parlay.drafters.stores.suffixes import Suffixes, chance
from parlay.types import NO_DRAFT, Draft, Tree


class SuffixDraft(NamedTuple):
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


class SuffixGrowth(NamedTuple):
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
        lengths = range(shortest + 1, longest + 1)
        return shortest + bisect_right(lengths, depth, key=lambda length: length + self.budget(length))


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
    """Grow a draft best first from ``state``, whose last ``length`` tokens match. None if it can't exceed ``floor``.

    The likeliest continuation becomes a node, and its children become continuations. Among equals, the first wins.
    """
    tokens, parents, shares, lengths = list[int](), list[int](), list[float](), list[int]()
    frontier: list[tuple[float, int, int, int, float, int, int]] = []
    budget, score, path_prob, parent, offered, open_below = growth.budget(length), 0.0, 1.0, -1, 0, True
    while len(tokens) < budget:
        for token, share, target in _continuations(suffixes, state, path_prob, growth) if open_below else ():
            offered += 1
            heapq.heappush(frontier, (-path_prob * share, offered, parent, token, share, target, length))
        if not frontier:
            break
        if score - frontier[0][0] * (budget - len(tokens)) <= floor:
            return None
        negative, _, above, token, share, state, length = heapq.heappop(frontier)
        path_prob, parent = -negative, len(tokens)
        score += path_prob
        tokens.append(token)
        parents.append(above)
        shares.append(share)
        lengths.append(length)
        length += 1
        open_below = length < suffixes.depth and token not in growth.stops
    if score <= floor:
        return None
    return SuffixDraft(tuple(tokens), tuple(parents), tuple(shares), tuple(lengths), score)


def _continuations(
    suffixes: Suffixes, state: int, path_prob: float, growth: SuffixGrowth
) -> list[tuple[int, float, int]]:
    """The children of a state whose path probability is ``path_prob``: tokens, each with its share and its state."""
    total, children = suffixes.frequent(state)
    if not growth.branching and children:
        children = [max(children, key=lambda child: child[1])]
    least = growth.min_prob * total / path_prob
    return [(token, count / total, target) for token, count, target in children if count >= least]
