"""The common part of lossy rules: they accept tokens that are good enough, and take the longest path of such tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.rule_input import RuleInput
from parlay.types import ParlayError, Verdict, trees

GoodEnough = Callable[[Vector], Callable[[int], bool]]
"""From a distribution to a test of its tokens: which of them pass."""


def longest(given: RuleInput, good_enough: GoodEnough, last_token: Callable[[Vector, int], int]) -> Verdict:
    """The longest path on which all tokens pass, the likeliest of several; then ``last_token(distribution, level)``."""
    tree = given.draft.tree
    families = trees.children(tree)
    real = len(tree) - given.draft.probes
    reached = [(-1, 0, 0.0)]  # node, depth, log-probability of the path
    best, best_rank, best_V = -1, (-1, 0.0), None
    for node, depth, logprob in reached:
        try:
            probs_V = given.target(node)
        except ParlayError:
            if node == -1:
                raise
            continue  # nothing can be drawn after this node, so no path may end or go on there
        if (depth, logprob) > best_rank:
            best, best_rank, best_V = node, (depth, logprob), probs_V
        passes = good_enough(probs_V)
        for child in families[node]:
            token = tree.tokens[child]
            if child < real and probs_V[token] > 0 and passes(token):
                reached.append((child, depth + 1, logprob + math.log(probs_V[token])))
    assert best_V is not None
    path = trees.path_to(tree, best)
    return Verdict(path, (*(tree.tokens[node] for node in path), last_token(best_V, len(path))))
