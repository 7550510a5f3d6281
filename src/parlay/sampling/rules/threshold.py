"""Acceptance by rank and distance from the best token, which is lossy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from parlay.sampling.laws import Vector
from parlay.sampling.rules.case import Case
from parlay.sampling.rules.judge import Judge
from parlay.sampling.rules.relaxed import longest
from parlay.types import Exactness, Law, Verdict


@dataclass(frozen=True, slots=True)
class Threshold(Judge):
    """Relaxed verification of blockwise drafts (GAD++, Xia et al. 2022, arXiv:2203.16487; Stern et al. 2018,
    arXiv:1811.03115, section 5: top-k and distance).

    A token passes if it is among the ``beta`` best and its logit is at most ``tau`` below the best one. ``beta=1`` is
    exact match for greedy requests. An infinite ``tau`` accepts by rank alone, and a very large ``beta`` by the ratio
    p(x) / max p >= exp(-tau). The rule was made for greedy requests, which it judges by logits before temperature.
    After the path comes a draw from p, or the best token for a greedy request.
    """

    exactness: ClassVar[Exactness] = Exactness.LOSSY
    laws: ClassVar[frozenset[Law]] = frozenset({"point"})
    matches_greedy: ClassVar[bool] = False
    beta: int = 5
    tau: float = 3.0

    def verdict(self, case: Case) -> Verdict:
        def last_token(law: Vector, level: int) -> int:
            return int(law.argmax()) if case.greedy else case.chance.draw(law, level)

        return longest(case, self._good_enough, last_token)

    def _good_enough(self, law: Vector) -> Callable[[int], bool]:
        floor = law.max() * math.exp(-self.tau)

        def passes(token: int) -> bool:
            better = (law > law[token]).sum() + (law[:token] == law[token]).sum()
            return bool(law[token] >= floor and better < self.beta)

        return passes
