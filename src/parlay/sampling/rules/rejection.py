"""Rejection of drawn tokens: speculative sampling, and its variants for several candidates."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.rule_input import Candidate, LevelRng, RuleInput, descend, residual
from parlay.types import DraftKind, Verdict


class Rejection(DistributionRule):
    """Speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

    A token x drawn from q is accepted with probability min(1, p(x) / q(x)), and otherwise replaced by a draw from
    norm((p - q)+). If a node has several children, that distribution becomes p for the next child after a rejection:
    multi-step speculative sampling (SpecInfer, Miao et al. 2024, arXiv:2305.09781). Siblings may be drawn from
    different distributions, if independently.
    """

    kinds = frozenset[DraftKind]({"iid"})

    def verdict(self, inputs: RuleInput) -> Verdict:
        return descend(inputs, one_by_one)


def one_by_one(target: Vector, candidates: Sequence[Candidate], rng: LevelRng) -> int:
    """Try the candidates in order. If none is accepted, draw from the residual distribution."""
    for token, drafted in candidates:
        if drafted[token] > 0:  # otherwise it can't have been drawn
            if rng.coin(min(1, target[token] / drafted[token])):
                return token
            target = residual(target, drafted)
    return rng.draw(target)


class WithoutReplacement(DistributionRule):
    """Recursive rejection sampling, for draws without replacement.

    RSD (Jeon et al. 2024, arXiv:2402.14160); Sequoia (Chen et al. 2024, arXiv:2402.12374). Siblings are tried in the
    order in which they were drawn. After a rejection, norm((p - q)+) becomes p for the next sibling, and q without the
    rejected token becomes q. Whether a further sibling is drawn may depend on earlier siblings, but not on itself.
    """

    kinds = frozenset[DraftKind]({"without_replacement"})

    def verdict(self, inputs: RuleInput) -> Verdict:
        return descend(inputs, in_drawing_order)


def in_drawing_order(target: Vector, candidates: Sequence[Candidate], rng: LevelRng) -> int:
    """Try the candidates in order.

    Each one names the distribution of the first draw; later draws came from its rest.
    """
    left = candidates[0][1].copy() if candidates else target
    for token, _ in candidates:
        if left[token] > 0:
            if rng.coin(min(1, target[token] / left[token])):
                return token
            target = residual(target, left)
            left[token] = 0
            left = left / left.sum() if left.any() else left
    return rng.draw(target)
