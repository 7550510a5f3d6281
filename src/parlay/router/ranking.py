"""Picks which of a batch's drafted nodes to verify, by the probability that the path to each is accepted."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import neg

Candidates = tuple[Sequence[int], list[float]]
"""Nodes of one draft in ascending order, closed under parents, and the path probability of each."""

NO_CANDIDATES: Candidates = ((), [])


def best(candidates: Sequence[Candidates], ranked: Sequence[float], count: int) -> list[Sequence[int]]:
    """The nodes of each draft that are among the ``count`` likeliest of all drafts, in ascending order.

    ``ranked``: path probabilities of all candidates, highest first. Among equals the first ones are kept. A kept node's
    parents are kept, too.
    """
    if count == len(ranked):
        return [nodes for nodes, _ in candidates]
    if count == 0:
        return [()] * len(candidates)
    edge = ranked[count - 1]
    equals = count - ranked.index(edge)
    kept: list[Sequence[int]] = []
    for nodes, path_probs in candidates:
        if isinstance(nodes, range):  # a chain: its path probabilities fall
            size = bisect_left(path_probs, -edge, key=neg)
            more = bisect_right(path_probs, -edge, key=neg) - size if equals else 0
            kept.append(nodes[: size + min(more, equals)])
            equals -= min(more, equals)
            continue
        chosen: list[int] = []
        for node, path_prob in zip(nodes, path_probs, strict=True):
            if path_prob > edge:
                chosen.append(node)
            elif path_prob == edge and equals:
                chosen.append(node)
                equals -= 1
        kept.append(chosen)
    return kept


def best_of(candidates: Candidates, count: int) -> Sequence[int]:
    """The ``count`` likeliest nodes of one draft, in ascending order, or all if there are fewer."""
    ranked = sorted(candidates[1], reverse=True)
    return best([candidates], ranked, min(count, len(ranked)))[0]
