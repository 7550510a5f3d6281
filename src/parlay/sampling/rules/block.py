"""Block verification: a chain judged as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlay import trees
from parlay.sampling.laws import Vector
from parlay.sampling.rules.case import Case, excess
from parlay.sampling.rules.judge import Judge
from parlay.types import Law, ParlayError, Verdict


class Block(Judge):
    """Block verification (Sun et al. 2024, arXiv:2403.10444): never fewer accepted tokens than by rejecting one by one.

    Every prefix of the chain has a weight p_i = min(1, p_(i-1) p(x_i) / q(x_i)) and a coin of its own, which holds with
    probability h_i = Z_i / (Z_i + 1 - p_i). Here Z_i = sum((p_i p - q)+) over the distributions after the prefix; the
    whole chain has h = p_n. The longest prefix whose coin holds is accepted, whatever the coins of shorter ones; then
    comes a draw from norm((p_i p - q)+), or from p after the whole chain.
    """

    laws = frozenset[Law]({"iid"})

    def verdict(self, case: Case) -> Verdict:
        tree = case.draft.tree
        if not trees.is_chain(tree):
            raise ValueError("accept rule Block judges chains, and this draft has branches")
        targets = [case.target(-1)]
        weights: list[Any] = [1]
        end = len(tree) - case.draft.probes
        for node in range(end):
            weights.append(_weight(weights[-1], targets[-1], case.drafted(node), tree.tokens[node]))
            try:
                targets.append(case.target(node))
            except ParlayError:  # nothing can be drawn after this node, so the chain ends here
                end = node + 1
                break
        return _decide(case, weights, targets, end)


def _weight(before: Any, target: Vector, drafted: Vector, token: int) -> Any:
    return min(1, before * target[token] / drafted[token]) if drafted[token] > 0 else 0


def _decide(case: Case, weights: list[Any], targets: list[Vector], end: int) -> Verdict:
    """``weights[i]`` belongs to the first i of ``end`` nodes, ``targets[i]`` is the target's distribution after them.

    The last target may be missing.
    """
    tokens = case.draft.tree.tokens

    def holds(length: int) -> bool:
        weight = weights[length]
        if weight > 0 and length < end:
            surplus = np.maximum(weight * targets[length] - case.drafted(length), 0).sum()
            weight = surplus / (surplus + 1 - weight) if surplus or weight < 1 else 1
        return case.chance.coin(weight, length - 1, 0)

    taken = next((length for length in range(end, 0, -1) if holds(length)), 0)
    if taken == len(targets):  # nothing can be drawn after it, so the last token ends the step
        return Verdict(tuple(range(taken - 1)), tokens[:taken])
    law = targets[taken]
    if taken < end:
        law = excess(weights[taken] * law, case.drafted(taken))
    return Verdict(tuple(range(taken)), (*tokens[:taken], case.chance.draw(law, taken)))
