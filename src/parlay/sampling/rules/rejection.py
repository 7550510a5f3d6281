"""Rejection of independent draws: speculative sampling, and its form for several candidates."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.rule_input import Candidate, LevelRng, RuleInput, descend, residual
from parlay.types import DraftKind, Verdict


class Rejection(DistributionRule):
    """Speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

    A token x drawn from q is accepted with probability min(1, p(x) / q(x)), and else replaced by a draw from
    norm((p - q)+). If a node has several children, each that is rejected leaves that distribution as p to the next:
    multi-step speculative sampling (SpecInfer, Miao et al. 2024, arXiv:2305.09781). Siblings may be drawn from
    different distributions, each independent of the others.
    """

    kinds = frozenset[DraftKind]({"iid"})

    def verdict(self, given: RuleInput) -> Verdict:
        return descend(given, one_by_one)


def one_by_one(target: Vector, candidates: Sequence[Candidate], rng: LevelRng) -> int:
    """Try the candidates in order; without success, draw from what remains of the target's distribution."""
    for token, drafted in candidates:
        if drafted[token] > 0:  # otherwise it can't have been drawn
            if rng.coin(min(1, target[token] / drafted[token])):
                return token
            target = residual(target, drafted)
    return rng.draw(target)
