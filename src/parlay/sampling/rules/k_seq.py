"""K-SEQ: accepts one of several independent draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.rule_input import Candidate, LevelRng, RuleInput, descend
from parlay.types import DraftKind, Verdict

_HALVINGS = 20


class KSeq(DistributionRule):
    """Sequential selection of k drafts (SpecTr, Sun et al. 2023, arXiv:2310.15141).

    Each of the k drafts that share the accepted prefix is accepted with probability min(1, p(x) / (r q(x))), with r in
    [1, k] such that 1 - (1 - beta)^k = r beta, where beta is the chance of accepting one of them. With one draft r is
    1, and the rule is rejection sampling. All siblings are drawn from one distribution.
    """

    kinds = frozenset[DraftKind]({"iid"})

    def verdict(self, inputs: RuleInput) -> Verdict:
        return descend(inputs, any_of)


def any_of(target: Vector, candidates: Sequence[Candidate], rng: LevelRng) -> int:
    """Try the candidates in order, all with the same r. If none is accepted, draw from the residual distribution."""
    if not candidates:
        return rng.draw(target)
    drafted = candidates[0][1]
    mass = _accepted_mass(target, drafted, ratio(target, drafted, len(candidates)))
    for token, _ in candidates:
        if drafted[token] > 0 and rng.coin(mass[token] / drafted[token]):
            return token
    beta = mass.sum()
    if beta > 0:
        rest = np.maximum(target - mass * ((1 - (1 - beta) ** len(candidates)) / beta), 0)
        target = rest if rest.sum() > 0 else target
    return rng.draw(target)


def ratio(target: Vector, drafted: Vector, count: int) -> Any:
    """Nearly the smallest r with 1 - (1 - beta(r))^k <= r beta(r). Any such r gives the text the right distribution."""
    both = (target > 0) & (drafted > 0)
    target, drafted = target[both], drafted[both]

    def holds(r: Any) -> bool:
        beta = _accepted_mass(target, drafted, r).sum()
        return bool(1 - (1 - beta) ** count <= r * beta)

    low, high = target.sum() * 0 + 1, target.sum() * 0 + count
    if holds(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _accepted_mass(target: Vector, drafted: Vector, r: Any) -> Vector:
    """The probability that each token is drawn and accepted: min(q, p / r)."""
    result: Vector = np.minimum(drafted, target / r)
    return result
