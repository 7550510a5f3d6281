"""Which of a batch's drafted nodes to verify, by the probability that the path down to each is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from parlay.types import Draft, trees

Candidates = tuple[Sequence[int], list[float]]
"""Nodes of one draft in ascending order, none without its parent, and the path probability of each."""

NO_CANDIDATES: Candidates = ((), [])

_STRIDES = 16  # about so many counts are compared


def best_count(ranked: Sequence[float], tokens: Callable[[float], float], seconds: Callable[[int], float]) -> int:
    """How many nodes to verify for the most tokens per second; of equals the fewest.

    ``ranked``: what each node adds, most first. ``tokens``: of the step, by the sum of ``ranked`` for the nodes that it
    verifies. ``seconds``: of the step, by their number.
    """
    gains = [0.0, *accumulate(ranked)]
    stride = -(-len(ranked) // _STRIDES) or 1
    counts: list[int] = [*range(0, len(ranked), stride), len(ranked)]

    def rate(count: int) -> float:
        return tokens(gains[count]) / seconds(count)

    return max(counts, key=rate)


def best(candidates: Sequence[Candidates], ranked: Sequence[float], count: int) -> list[Sequence[int]]:
    """The nodes of each draft that are among the ``count`` likeliest of all, in ascending order; of equals the first.

    ``ranked``: path probabilities of all candidates, highest first. A kept node's parents are kept too.
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
    """The ``count`` likeliest nodes of one draft, in ascending order, or all if there are fewer."""
    ranked = sorted(candidates[1], reverse=True)
    return best([candidates], ranked, min(count, len(ranked)))[0]


def cut_to(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The draft with these nodes only; drawn drafts stay whole."""
    whole = draft.kind != "point" or len(nodes) == len(draft) - draft.probes
    return draft if whole else trees.prune(draft, nodes)
