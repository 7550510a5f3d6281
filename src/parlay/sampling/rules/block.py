"""Block verification: a chain judged as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.rule_input import RuleInput, residual
from parlay.types import DraftKind, ParlayError, Verdict, trees


class BlockVerification(DistributionRule):
    """Block verification (Sun et al. 2024, arXiv:2403.10444): never fewer accepted tokens than by rejecting one by one.

    Every prefix of the chain has a weight p_i = min(1, p_(i-1) p(x_i) / q(x_i)) and a coin of its own, which holds with
    probability h_i = Z_i / (Z_i + 1 - p_i). Here Z_i = sum((p_i p - q)+) over the distributions after the prefix; the
    whole chain has h = p_n. The longest prefix whose coin holds is accepted, whatever the coins of shorter ones; then
    comes a draw from norm((p_i p - q)+), or from p after the whole chain.
    """

    kinds = frozenset[DraftKind]({"iid"})

    def verdict(self, inputs: RuleInput) -> Verdict:
        tree = inputs.draft.tree
        if not trees.is_chain(tree):
            raise ValueError("accept rule BlockVerification judges chains, and this draft has branches")
        targets = [inputs.target(-1)]
        weights: list[Any] = [1]
        end = len(tree) - inputs.draft.probes
        for node in range(end):
            weights.append(_weight(weights[-1], targets[-1], inputs.drafted(node), tree.tokens[node]))
            try:
                targets.append(inputs.target(node))
            except ParlayError:  # no token can be drawn after this node, so the chain ends here
                end = node + 1
                break
        return _decide(inputs, weights, targets, end)


def _weight(before: Any, target: Vector, drafted: Vector, token: int) -> Any:
    return min(1, before * target[token] / drafted[token]) if drafted[token] > 0 else 0


def _decide(inputs: RuleInput, weights: list[Any], targets: list[Vector], end: int) -> Verdict:
    """``weights[i]`` belongs to the first i of ``end`` nodes; ``targets[i]`` is the target's distribution after them.

    The last target may be missing.
    """
    tokens = inputs.draft.tree.tokens

    def holds(length: int) -> bool:
        weight = weights[length]
        if weight > 0 and length < end:
            surplus = np.maximum(weight * targets[length] - inputs.drafted(length), 0).sum()
            weight = surplus / (surplus + 1 - weight) if surplus or weight < 1 else 1
        return inputs.rng.coin(weight, length - 1, 0)

    taken = next((length for length in range(end, 0, -1) if holds(length)), 0)
    if taken == len(targets):  # no token can be drawn after it, so the last token ends the step
        return Verdict(tuple(range(taken - 1)), tokens[:taken])
    probs_V = targets[taken]
    if taken < end:
        probs_V = residual(weights[taken] * probs_V, inputs.drafted(taken))
    return Verdict(tuple(range(taken)), (*tokens[:taken], inputs.rng.draw(probs_V, taken)))
