"""Rejection of draws without replacement."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.rule_input import Candidate, LevelRng, RuleInput, descend, residual
from parlay.types import DraftKind, Verdict


class WithoutReplacement(DistributionRule):
    """Recursive rejection sampling (RSD, Jeon et al. 2024, arXiv:2402.14160; Sequoia, Chen et al. 2024,
    arXiv:2402.12374).

    Siblings are tried in the order in which they were drawn. One that is rejected leaves norm((p - q)+) as p to the
    next, and q without its token as q. Whether a further sibling is drawn may depend on those before it, but not on
    itself.
    """

    kinds = frozenset[DraftKind]({"without_replacement"})

    def verdict(self, given: RuleInput) -> Verdict:
        return descend(given, in_drawing_order)


def in_drawing_order(target: Vector, candidates: Sequence[Candidate], rng: LevelRng) -> int:
    """Every candidate names the distribution of the first draw. The later draws came from what was left of it."""
    left = candidates[0][1].copy() if candidates else target
    for token, _ in candidates:
        if left[token] > 0:
            if rng.coin(min(1, target[token] / left[token])):
                return token
            target = residual(target, left)
            left[token] = 0
            left = left / left.sum() if left.any() else left
    return rng.draw(target)
