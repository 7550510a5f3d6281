"""Rejection of draws without replacement."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.sampling.laws import Vector
from parlay.sampling.rules.case import Candidate, Case, Dice, descend, excess
from parlay.sampling.rules.judge import Judge
from parlay.types import Law, Verdict


class WithoutReplacement(Judge):
    """Recursive rejection sampling (RSD, Jeon et al. 2024, arXiv:2402.14160; Sequoia, Chen et al. 2024,
    arXiv:2402.12374).

    Siblings are tried in the order in which they were drawn. One that is rejected leaves norm((p - q)+) as p to the
    next, and q without its token as q. Whether a further sibling is drawn may depend on those before it, but not on
    itself.
    """

    laws = frozenset[Law]({"without_replacement"})

    def verdict(self, case: Case) -> Verdict:
        return descend(case, in_drawing_order)


def in_drawing_order(target: Vector, candidates: Sequence[Candidate], dice: Dice) -> int:
    """Every candidate names the distribution of the first draw. The later draws came from what was left of it."""
    left = candidates[0][1].copy() if candidates else target
    for token, _ in candidates:
        if left[token] > 0:
            if dice.coin(min(1, target[token] / left[token])):
                return token
            target = excess(target, left)
            left[token] = 0
            left = left / left.sum() if left.any() else left
    return dice.draw(target)
