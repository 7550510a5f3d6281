"""Typical acceptance, which is lossy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from parlay.sampling.laws import Vector
from parlay.sampling.rules.case import Case
from parlay.sampling.rules.judge import Judge
from parlay.sampling.rules.relaxed import longest
from parlay.types import Exactness, Law, Verdict


@dataclass(frozen=True, slots=True)
class Typical(Judge):
    """Typical acceptance (Medusa, Cai et al. 2024, arXiv:2401.10774).

    A token passes if p(x) > min(eps, delta exp(-H(p))): the less certain the target, the less likely it may be. The
    rule takes the longest path that passes, the likeliest if there are several, and then draws from p. Greedy requests
    get exact match.
    """

    exactness: ClassVar[Exactness] = Exactness.LOSSY
    laws: ClassVar[frozenset[Law]] = frozenset({"point"})
    eps: float = 0.09
    delta: float = 0.3

    def verdict(self, case: Case) -> Verdict:
        return longest(case, self._good_enough, lambda law, level: case.chance.draw(law, level))

    def _good_enough(self, law: Vector) -> Callable[[int], bool]:
        floor = min(self.eps, self.delta * float(np.exp(-entropy(law))))
        return lambda token: bool(law[token] > floor)


def entropy(law: Vector) -> float:
    """The entropy of a distribution, in nats."""
    some = law[law > 0]
    return float(-(some * np.log(some)).sum())
