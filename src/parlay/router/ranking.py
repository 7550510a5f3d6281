"""Which of a batch's drafted nodes are worth verifying: by the probability that the path down to each is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

Candidates = tuple[Sequence[int], list[float]]
"""Nodes of one draft, rising and closed under parents, and the path probability of each, at most its parent's."""

NO_CANDIDATES: Candidates = ((), [])

_STRIDES = 16  # at most about so many counts are compared


def best_count(ranked: Sequence[float], plain: int, seconds: Callable[[int], float]) -> int:
    """How many of the nodes to verify: where tokens per second are highest, and fewer of equals.

    ``ranked``: path probabilities, highest first. ``plain`` tokens come without any node. ``seconds`` gives those of
    the step by the nodes that it verifies.
    """
    gains = [0.0, *accumulate(ranked)]
    stride = -(-len(ranked) // _STRIDES) or 1
    counts: list[int] = [*range(0, len(ranked), stride), len(ranked)]

    def rate(count: int) -> float:
        return (plain + gains[count]) / seconds(count)

    return max(counts, key=rate)


def best(candidates: Sequence[Candidates], ranked: Sequence[float], count: int) -> list[Sequence[int]]:
    """Of each draft the nodes that are among the ``count`` best, rising; of equals those that come first.

    ``ranked`` are the path probabilities of all candidates, highest first. What is kept of a draft is closed under
    parents.
    """
    if count == len(ranked):
        return [nodes for nodes, _ in candidates]
    if count == 0:
        return [()] * len(candidates)
    edge = ranked[count - 1]
    equals = count - ranked.index(edge)
    kept: list[Sequence[int]] = []
    for nodes, path_probs in candidates:
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
    """The ``count`` best nodes of one draft, rising; fewer where there are fewer."""
    ranked = sorted(candidates[1], reverse=True)
    return best([candidates], ranked, min(count, len(ranked)))[0]
