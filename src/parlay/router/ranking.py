"""Which of a batch's drafted nodes are best: by the chance that the path down to each is accepted."""

from __future__ import annotations

from collections.abc import Sequence

Candidates = tuple[Sequence[int], list[float]]
"""Nodes of one draft, rising and closed under parents, and the chance of each, which is at most its parent's."""

NOBODY: Candidates = ((), [])


def best(candidates: Sequence[Candidates], ranked: Sequence[float], count: int) -> list[Sequence[int]]:
    """Of each draft the nodes that are among the ``count`` best, rising; of equals those that come first.

    ``ranked`` are the chances of all candidates, highest first. What is kept of a draft is closed under parents.
    """
    if count == len(ranked):
        return [nodes for nodes, _ in candidates]
    if count == 0:
        return [()] * len(candidates)
    edge = ranked[count - 1]
    equals = count - ranked.index(edge)
    kept: list[Sequence[int]] = []
    for nodes, reaches in candidates:
        chosen: list[int] = []
        for node, reach in zip(nodes, reaches, strict=True):
            if reach > edge:
                chosen.append(node)
            elif reach == edge and equals:
                chosen.append(node)
                equals -= 1
        kept.append(chosen)
    return kept


def best_of(candidates: Candidates, count: int) -> Sequence[int]:
    """The ``count`` best nodes of one draft, rising; fewer where there are fewer."""
    ranked = sorted(candidates[1], reverse=True)
    return best([candidates], ranked, min(count, len(ranked)))[0]
