"""The best tree of a given size for measured acceptance by rank, its filling with tokens, and the record."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.draft_models.guesses import Guess, falling
from parlay.types import NO_DRAFT, Draft, Tree, trees

_FIRST, _FALL = 0.6, 0.3  # acceptance of the likeliest token before anything was seen, and what each rank leaves of it
_WEIGHT = 8.0  # observations that this guess, or the record of all depths, is worth
_DECAY = 0.995  # of a depth's record, per observation

Acceptance = Sequence[Sequence[float]]
"""``[d][r]``: how often the token of rank r is the right one, d levels below the root, given that its parent is."""


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A tree without tokens, best node first: its first n nodes are the best tree of n nodes."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]
    """Of each node given its parent."""
    path_probs: tuple[float, ...]
    """Of the whole path to each node."""

    @property
    def expected(self) -> float:
        """Tokens per step: 1 plus the chance of every node's path."""
        return 1 + sum(self.path_probs)

    @property
    def levels(self) -> int:
        return max(self.depths, default=0)


def best_tree(acceptance: Acceptance, nodes: int, levels: int) -> StaticTree:
    """The tree of at most ``nodes`` nodes and ``levels`` levels with the most expected tokens.

    It has the highest products of acceptance along their paths, and is closed under parents because none exceeds 1, as
    long as no rank is better than the one before. That is what Sequoia's recurrence T(m, l, b) finds, without a table.
    Nodes that are never right are left out.
    """
    grown: list[tuple[int, int, int, float, float]] = []
    candidates: list[tuple[float, int, int, int]] = []  # -path_prob, depth, parent, rank

    def offer(parent: int, depth: int, rank: int, above: float) -> None:
        if depth < min(levels, len(acceptance)) and rank < len(acceptance[depth]) and acceptance[depth][rank] > 0:
            heapq.heappush(candidates, (-above * acceptance[depth][rank], depth, parent, rank))

    offer(-1, 0, 0, 1.0)
    while candidates and len(grown) < nodes:
        path_prob, depth, parent, rank = heapq.heappop(candidates)
        node = len(grown)
        grown.append((parent, rank, depth + 1, acceptance[depth][rank], -path_prob))
        offer(parent, depth, rank + 1, grown[parent][4] if parent >= 0 else 1.0)
        offer(node, depth + 1, 0, -path_prob)
    return (
        StaticTree(*(tuple(column) for column in zip(*grown, strict=True))) if grown else StaticTree((), (), (), (), ())
    )


def best_shape(acceptance: Acceptance, nodes: int, level_cost: float) -> StaticTree:
    """The best tree of any depth, by tokens over time: one target forward, and ``level_cost`` of one for each level."""
    trees = [best_tree(acceptance, nodes, levels) for levels in range(1, len(acceptance) + 1)]
    return max(trees, key=lambda tree: tree.expected / (1 + level_cost * tree.levels))


class FilledTree:
    """A shape that is filled with guesses, from the root down."""

    def __init__(self, shape: StaticTree) -> None:
        self._shape = shape
        self._children = trees.children(Tree(shape.ranks, shape.parents))
        self._filled: dict[int, Guess] = {}

    def token(self, node: int) -> int:
        """Token of a filled node."""
        return self._filled[node][0]

    def parent(self, node: int) -> int:
        """The node above; the root is -1."""
        return self._shape.parents[node]

    def inner(self, level: int) -> list[int]:
        """The filled nodes so deep that have children in the shape; the root, which is -1, is at 0."""
        nodes = [-1] if level == 0 else [node for node in sorted(self._filled) if self._shape.depths[node] == level]
        return [node for node in nodes if self._children[node]]

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to a filled node."""
        above = []
        while node >= 0:
            above.append(self.token(node))
            node = self._shape.parents[node]
        return above[::-1]

    def fill(self, node: int, found: Sequence[Guess]) -> None:
        """A node's children get the guesses of their ranks; where fewer are offered, they are left out."""
        for child in self._children[node]:
            if self._shape.ranks[child] < len(found):
                self._filled[child] = found[self._shape.ranks[child]]

    def draft(self, source: str, scores: Sequence[float] | None = None) -> Draft:
        """The filled nodes, best first. ``scores``: of all nodes of the shape; else the guesses' probabilities."""
        nodes = sorted(self._filled)
        if not nodes:
            return NO_DRAFT
        places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        tree = Tree(
            tuple(self.token(node) for node in nodes), tuple(places[self._shape.parents[node]] for node in nodes)
        )
        own = tuple(self._filled[node][1] if scores is None else scores[node] for node in nodes)
        return Draft(tree, sources=(source,) * len(nodes), scores=own)


class RankRecord:
    """How often each rank was right at each depth, lately; a depth leans on all depths, and these on a guess."""

    def __init__(self, levels: int, width: int) -> None:
        guess = [_FIRST * _FALL**rank for rank in range(width)]
        self._all = _Counts(guess)
        self._depths = [_Counts([0.0] * width) for _ in range(levels)]

    def learn(self, depth: int, rank: int | None) -> None:
        """The right token ``depth`` levels below the root had this rank; None: a worse one."""
        self._all.learn(rank)
        if depth < len(self._depths):
            self._depths[depth].learn(rank)

    @property
    def is_known(self) -> bool:
        """Whether as much was seen as the guess that it began with counts."""
        return self._all.seen >= 2 * _WEIGHT

    @property
    def acceptance(self) -> list[list[float]]:
        """Never better at a later rank than at an earlier one."""
        overall = self._all.shares([0.0] * len(self._all.right), 0.0)
        return [falling(counts.shares(overall, _WEIGHT)) for counts in self._depths]


class _Counts:
    def __init__(self, guess: Sequence[float]) -> None:
        self.right = [_WEIGHT * share for share in guess]
        self.seen = _WEIGHT if any(guess) else 0.0

    def learn(self, rank: int | None) -> None:
        self.right = [count * _DECAY for count in self.right]
        self.seen = self.seen * _DECAY + 1
        if rank is not None:
            self.right[rank] += 1

    def shares(self, lean: Sequence[float], weight: float) -> list[float]:
        return [(count + weight * share) / (self.seen + weight) for count, share in zip(self.right, lean, strict=True)]
