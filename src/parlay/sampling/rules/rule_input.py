"""One sequence as a rule sees it: its draft, the distributions at its nodes, and random numbers.

The code here and in the rules works on floats and on fractions alike. So tests can run it on exact rationals, over all
outcomes of the random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from parlay.sampling import noise
from parlay.sampling.distributions import Vector, pick, soft_distribution
from parlay.sampling.noise import Purpose
from parlay.types import Draft, NoiseKey, ParlayError, SequenceView, Verdict, trees

Candidate = tuple[int, Vector]
"""A drafted token and the distribution that it was drawn from."""


class Rng(Protocol):
    """The randomness of one step. ``level`` 0 is the first token that the step commits."""

    def coin(self, probability: Any, level: int, number: int) -> bool:
        """True with this probability. Each ``number`` is an independent coin."""
        ...

    def draw(self, weights: Vector, level: int) -> int:
        """A token, with a probability proportional to its weight."""
        ...


@dataclass(frozen=True, slots=True)
class StepRng:
    """Coins and draws of the step that begins at absolute position ``step``."""

    key: NoiseKey
    step: int

    def coin(self, probability: Any, level: int, number: int) -> bool:
        state = noise.stream(self.key, self.step + level, Purpose.COIN, self.step, number)
        return noise.uniform_of(state) < float(probability)

    def draw(self, weights: Vector, level: int) -> int:
        state = noise.stream(self.key, self.step + level, Purpose.RESIDUAL, self.step)
        return pick(weights, noise.uniform_of(state))


@dataclass(frozen=True, slots=True)
class RuleInput:
    """One sequence's draft, and everything that a rule needs to judge it.

    ``target(node)``: the target's distribution of the token after ``node`` (-1: the root), processed on the node's own
    path; may raise ParlayError. ``drafted(node)``: the distribution that the node was drawn from. ``greedy``: the
    request wants the best token; the target's distribution then tells how much better that is. ``kind``: the kind of
    task of the request, if known.
    """

    draft: Draft
    target: Callable[[int], Vector]
    drafted: Callable[[int], Vector]
    rng: Rng
    greedy: bool = False
    kind: str = ""


def rule_input(view: SequenceView, draft: Draft, logits_RV: Tensor, root: int) -> RuleInput:
    """The input for a sequence whose root is row ``root`` of the logits."""
    tree, probs = draft.tree, draft.probs

    def target(node: int) -> Vector:
        path = [tree.tokens[above] for above in trees.path_to(tree, node)]
        vector: Vector = soft_distribution(logits_RV[root + 1 + node], view, path).cpu().numpy()
        return vector

    def drafted(node: int) -> Vector:
        assert probs is not None
        vector: Vector = probs[node].double().cpu().numpy()
        return vector

    request, rng = view.request, StepRng(view.request.key, len(view.tokens))
    return RuleInput(draft, target, drafted, rng, request.params.greedy, request.kind)


class LevelRng:
    """The random numbers of one level. Each coin is a new one."""

    def __init__(self, rng: Rng, level: int) -> None:
        self._rng = rng
        self._level = level
        self._coins = 0

    def coin(self, probability: Any) -> bool:
        self._coins += 1
        return self._rng.coin(probability, self._level, self._coins - 1)

    def draw(self, weights: Vector) -> int:
        return self._rng.draw(weights, self._level)


Choose = Callable[[Vector, Sequence[Candidate], LevelRng], int]
"""Chooses a token that is distributed as the first argument says, and is a candidate as often as possible."""


def descend(inputs: RuleInput, choose: Choose) -> Verdict:
    """Walk down from the root: choose a token, and continue below the nodes that have it, as long as there are any.

    Equal siblings (independent draws may be equal) count as one node: the children of all of them are candidates.
    """
    tree = inputs.draft.tree
    families = trees.children(tree)
    real = len(tree) - inputs.draft.probes
    here, last = [-1], -1
    sampled: list[int] = []
    while here:
        last = here[0]
        try:
            target = inputs.target(last)
        except ParlayError:
            if not sampled:
                raise
            break  # earlier tokens stay valid; the next step meets the fault at its root
        below = [child for node in here for child in families[node] if child < real]
        candidates = [(tree.tokens[child], inputs.drafted(child)) for child in below]
        sampled.append(choose(target, candidates, LevelRng(inputs.rng, len(sampled))))
        here = [child for child in below if tree.tokens[child] == sampled[-1]]
    return Verdict(trees.path_to(tree, last)[: len(sampled) - 1], tuple(sampled))


def residual(target: Vector, drafted: Vector) -> Vector:
    """norm((p - q)+): the target's distribution after a draw from ``drafted`` was rejected."""
    rest = np.maximum(target - drafted, 0)
    total = rest.sum()
    return rest / total if total > 0 else target  # p and q are equal up to rounding, which also caused the rejection
