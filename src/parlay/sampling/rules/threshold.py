"""Acceptance by rank and distance from the best token, which is lossy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.relaxed import longest
from parlay.sampling.rules.rule_input import RuleInput
from parlay.types import DraftKind, Exactness, Verdict


@dataclass(frozen=True, slots=True)
class Threshold(DistributionRule):
    """Relaxed verification of blockwise drafts (GAD++, Xia et al. 2022, arXiv:2203.16487; Stern et al. 2018,
    arXiv:1811.03115, section 5: top-k and distance).

    A token passes if it is among the ``beta`` best and its logit is at most ``tau`` below the best one. ``beta=1`` is
    exact match for greedy requests. An infinite ``tau`` accepts by rank alone, and a very large ``beta`` by the ratio
    p(x) / max p >= exp(-tau). The rule was made for greedy requests, which it judges by logits before temperature.
    After the path comes a draw from p, or the best token for a greedy request.
    """

    exactness: ClassVar[Exactness] = Exactness.LOSSY
    kinds: ClassVar[frozenset[DraftKind]] = frozenset({"point"})
    matches_greedy: ClassVar[bool] = False
    beta: int = 5
    tau: float = 3.0

    def verdict(self, given: RuleInput) -> Verdict:
        def last_token(probs_V: Vector, level: int) -> int:
            return int(probs_V.argmax()) if given.greedy else given.rng.draw(probs_V, level)

        return longest(given, self._good_enough, last_token)

    def _good_enough(self, probs_V: Vector) -> Callable[[int], bool]:
        floor = probs_V.max() * math.exp(-self.tau)

        def passes(token: int) -> bool:
            better = (probs_V > probs_V[token]).sum() + (probs_V[:token] == probs_V[token]).sum()
            return bool(probs_V[token] >= floor and better < self.beta)

        return passes
