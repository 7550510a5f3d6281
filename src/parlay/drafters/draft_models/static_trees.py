"""Static trees: the best shape of a given size for measured acceptance by rank, filled with tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.draft_models.guesses import Guess, falling
from parlay.types import NO_DRAFT, Draft, Tree, trees

_FIRST, _FALL = 0.6, 0.3  # prior acceptance of the likeliest token, and the factor from each rank to the next
_WEIGHT = 8.0  # how many observations the prior, or the record of all depths, counts as
_DECAY = 0.995  # decay of a depth's record, per observation

Acceptance = Sequence[Sequence[float]]
"""``[d][r]``: how often the token of rank r, d levels below the root, is right if its parent is."""


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A shape of a tree, best node first: its first n nodes are the best tree with n nodes."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]
    """Acceptance of each node if its parent is right."""
    path_probs: tuple[float, ...]
    """Probability of the whole path to each node."""

    @property
    def expected(self) -> float:
        """Expected tokens per step: 1 plus the probabilities of all nodes' paths."""
        return 1 + sum(self.path_probs)

    @property
    def levels(self) -> int:
        return max(self.depths, default=0)


def best_tree(acceptance: Acceptance, nodes: int, levels: int) -> StaticTree:
    """The tree of at most ``nodes`` nodes and ``levels`` levels with the most expected tokens.

    It has the nodes with the highest products of acceptance along their paths. It is closed under parents, because no
    factor exceeds 1 and no rank is better than the one before. Sequoia's recurrence T(m, l, b) finds the same tree with
    a table. Nodes that are never right are left out.
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
    """The best tree of any depth, by tokens per time; a level takes ``level_cost`` of a target forward."""
    trees = [best_tree(acceptance, nodes, levels) for levels in range(1, len(acceptance) + 1)]
    return max(trees, key=lambda tree: tree.expected / (1 + level_cost * tree.levels))


class FilledTree:
    """A shape that is filled with guesses from the root down."""

    def __init__(self, shape: StaticTree) -> None:
        self._shape = shape
        self._children = trees.children(Tree(shape.ranks, shape.parents))
        self._filled: dict[int, Guess] = {}

    def token(self, node: int) -> int:
        """The token of a filled node."""
        return self._filled[node][0]

    def parent(self, node: int) -> int:
        """The parent of a node; the root is -1."""
        return self._shape.parents[node]

    def inner(self, level: int) -> list[int]:
        """The filled nodes of a level that have children in the shape; level 0 is the root, -1."""
        nodes = [-1] if level == 0 else [node for node in sorted(self._filled) if self._shape.depths[node] == level]
        return [node for node in nodes if self._children[node]]

    def path(self, node: int) -> list[int]:
        """The tokens from below the root to a filled node."""
        above = []
        while node >= 0:
            above.append(self.token(node))
            node = self._shape.parents[node]
        return above[::-1]

    def fill(self, node: int, found: Sequence[Guess]) -> None:
        """Give each child of a node the guess of its rank. Children without a guess are left out."""
        for child in self._children[node]:
            if self._shape.ranks[child] < len(found):
                self._filled[child] = found[self._shape.ranks[child]]

    def draft(self, source: str, scores: Sequence[float] | None = None) -> Draft:
        """The filled nodes, best first. ``scores``: for all nodes of the shape; default: the guesses' probabilities."""
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
    """How often each rank was right recently, by depth.

    The prior of each depth is the record of all depths, which begins with a guess.
    """

    def __init__(self, levels: int, width: int) -> None:
        guess = [_FIRST * _FALL**rank for rank in range(width)]
        self._all = _Counts(guess)
        self._depths = [_Counts([0.0] * width) for _ in range(levels)]

    def learn(self, depth: int, rank: int | None) -> None:
        """Note the rank of the right token ``depth`` levels below the root; None: a lower rank than all."""
        self._all.learn(rank)
        if depth < len(self._depths):
            self._depths[depth].learn(rank)

    @property
    def is_known(self) -> bool:
        """Whether the observations outweigh the initial guess."""
        return self._all.seen >= 2 * _WEIGHT

    @property
    def acceptance(self) -> list[list[float]]:
        """The acceptance by depth and rank, made non-increasing over ranks."""
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
