"""Typical acceptance, which is lossy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.relaxed import longest
from parlay.sampling.rules.rule_input import RuleInput
from parlay.types import DraftKind, Exactness, Verdict


@dataclass(frozen=True, slots=True)
class Typical(DistributionRule):
    """Typical acceptance (Medusa, Cai et al. 2024, arXiv:2401.10774).

    A token passes if p(x) > min(eps, delta exp(-H(p))): the less certain the target, the less likely it may be. The
    rule takes the longest path that passes, the likeliest if there are several, and then draws from p. Greedy requests
    get exact match.
    """

    exactness: ClassVar[Exactness] = Exactness.LOSSY
    kinds: ClassVar[frozenset[DraftKind]] = frozenset({"point"})
    eps: float = 0.09
    delta: float = 0.3

    def verdict(self, given: RuleInput) -> Verdict:
        return longest(given, self._good_enough, lambda probs_V, level: given.rng.draw(probs_V, level))

    def _good_enough(self, probs_V: Vector) -> Callable[[int], bool]:
        floor = min(self.eps, self.delta * float(np.exp(-entropy(probs_V))))
        return lambda token: bool(probs_V[token] > floor)


def entropy(probs_V: Vector) -> float:
    """The entropy of a distribution, in nats."""
    some = probs_V[probs_V > 0]
    return float(-(some * np.log(some)).sum())
