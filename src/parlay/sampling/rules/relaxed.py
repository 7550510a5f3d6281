"""What lossy rules share: they accept tokens that are good enough, and take the longest path of such tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

from parlay import trees
from parlay.sampling.laws import Vector
from parlay.sampling.rules.case import Case
from parlay.types import ParlayError, Verdict

GoodEnough = Callable[[Vector], Callable[[int], bool]]
"""From a distribution to a test of its tokens: which of them pass."""


def longest(case: Case, good_enough: GoodEnough, last_token: Callable[[Vector, int], int]) -> Verdict:
    """The longest path on which all tokens pass, the likeliest of several; then ``last_token(law, level)``."""
    tree = case.draft.tree
    families = trees.children(tree)
    real = len(tree) - case.draft.probes
    reached = [(-1, 0, 0.0)]  # node, depth, log-probability of the path
    best, best_rank, best_law = -1, (-1, 0.0), None
    for node, depth, logprob in reached:
        try:
            law = case.target(node)
        except ParlayError:
            if node == -1:
                raise
            continue  # nothing can be drawn after this node, so no path may end or go on there
        if (depth, logprob) > best_rank:
            best, best_rank, best_law = node, (depth, logprob), law
        passes = good_enough(law)
        for child in families[node]:
            token = tree.tokens[child]
            if child < real and law[token] > 0 and passes(token):
                reached.append((child, depth + 1, logprob + math.log(law[token])))
    assert best_law is not None
    path = trees.path_to(tree, best)
    return Verdict(path, (*(tree.tokens[node] for node in path), last_token(best_law, len(path))))
