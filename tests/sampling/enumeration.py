"""Enumerates every outcome of random choices in exact rationals, which proves a rule instead of estimating it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar

import numpy as np

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.rule_input import RuleInput
from parlay.types import Draft, DraftKind, Tree, Verdict, trees

Outcome = TypeVar("Outcome")


class Explorer:
    """A `Rng` that follows a script of choices, takes the first way where it ends, and notes the others."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.taken: list[int] = []
        self.others: list[list[int]] = []
        self.weight = Fraction(1)

    def coin(self, probability: Any, level: int, number: int) -> bool:
        probability = Fraction(probability)
        assert 0 <= probability <= 1, f"a coin of chance {probability}"
        return bool(self._choose([1 - probability, probability]))

    def draw(self, weights: Vector, level: int) -> int:
        assert min(weights) >= 0
        total = sum(weights)
        return self._choose([Fraction(weight) / total for weight in weights])

    def _choose(self, chances: Sequence[Fraction]) -> int:
        ways = [way for way, chance in enumerate(chances) if chance > 0]
        place = len(self.taken)
        way = self._script[place] if place < len(self._script) else ways[0]
        if place >= len(self._script):
            self.others += [[*self.taken, other] for other in ways[1:]]
        self.taken.append(way)
        self.weight *= chances[way]
        return way


def outcomes(run: Callable[[Explorer], Outcome]) -> Iterator[tuple[Outcome, Fraction]]:
    """Yield every value that ``run`` can return, with its probability. A value may come several times."""
    scripts: list[list[int]] = [[]]
    while scripts:
        explorer = Explorer(scripts.pop())
        yield run(explorer), explorer.weight
        scripts += explorer.others


def vector(values: Sequence[Fraction | int]) -> Vector:
    return np.array([Fraction(value) for value in values], dtype=object)


@dataclass
class Model:
    """Random rational distributions, another after each text."""

    seed: int
    size: int = 3
    zeros: bool = False
    """Some tokens have no chance, as after top-k."""
    known: dict[tuple[int, ...], Vector] = field(default_factory=dict)

    def __call__(self, text: Sequence[int]) -> Vector:
        key = tuple(text)
        if key not in self.known:
            chance = random.Random(f"{self.seed} {key}")
            weights = [chance.randint(0 if self.zeros else 1, 7) for _ in range(self.size)]
            weights[chance.randrange(self.size)] += 1
            self.known[key] = vector([Fraction(weight, sum(weights)) for weight in weights])
        return self.known[key]


Grown = list[tuple[int, int, Vector]]
"""Nodes in order: token, parent, and the distribution each was drawn from."""

Grow = Callable[[Explorer, Model], Grown]


def iid(explorer: Explorer, drafter: Model, widths: Sequence[int], most: int = 99) -> Grown:
    """Level by level ``widths`` independent children of every node, the first ``most`` nodes of all."""
    nodes: Grown = []
    texts: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
    for width in widths:
        below = []
        for parent, text in texts:
            for _ in range(width):
                if len(nodes) < most:
                    token = explorer.draw(drafter(text), len(text))
                    below.append((len(nodes), (*text, token)))
                    nodes.append((token, parent, drafter(text)))
        texts = below
    return nodes


def without_replacement(explorer: Explorer, drafter: Model, widths: Sequence[int], most: int = 99) -> Grown:
    """Draw as above, but without repeated siblings; fewer of them if the distribution is used up."""
    nodes: Grown = []
    texts: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
    for width in widths:
        below = []
        for parent, text in texts:
            left = drafter(text).copy()
            for _ in range(width):
                if len(nodes) < most and left.any():
                    token = explorer.draw(left, len(text))
                    left[token] = Fraction(0)
                    below.append((len(nodes), (*text, token)))
                    nodes.append((token, parent, drafter(text)))
        texts = below
    return nodes


def given(nodes: Grown, target: Model, explorer: Explorer, kind: DraftKind = "iid") -> RuleInput:
    tree = Tree(tuple(token for token, _, _ in nodes), tuple(parent for _, parent, _ in nodes))
    draft = Draft(tree, kind=kind, sources=("test",) * len(tree))
    return RuleInput(
        draft,
        lambda node: target([tree.tokens[above] for above in trees.path_to(tree, node)]),
        lambda node: nodes[node][2],
        explorer,
    )


def text_distribution(
    verdict_of: Callable[[Explorer], Verdict], target: Model, length: int
) -> tuple[dict[tuple[int, ...], Fraction], Fraction]:
    """The distribution of the first ``length`` tokens, where a step that commits fewer is followed by plain decoding;
    and how many drafted tokens it accepts on average."""
    distribution: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    accepted = Fraction(0)
    for verdict, weight in outcomes(verdict_of):
        assert len(verdict.sampled) == len(verdict.path) + 1
        accepted += weight * len(verdict.path)
        for rest, chance in continuations(target, verdict.sampled[:length], length):
            distribution[rest] += weight * chance
    return dict(distribution), accepted


def continuations(target: Model, text: tuple[int, ...], length: int) -> Iterator[tuple[tuple[int, ...], Fraction]]:
    if len(text) == length:
        yield text, Fraction(1)
        return
    for token, chance in enumerate(target(text)):
        if chance > 0:
            for whole, rest in continuations(target, (*text, token), length):
                yield whole, chance * rest


@cache
def _plain(seed: int, size: int, zeros: bool, length: int) -> dict[tuple[int, ...], Fraction]:
    return dict(continuations(Model(seed, size, zeros), (), length))


def plain_distribution(target: Model, length: int) -> dict[tuple[int, ...], Fraction]:
    return _plain(target.seed, target.size, target.zeros, length)
