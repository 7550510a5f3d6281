"""Drafts under a constraint: forbidden nodes are removed, and tokens without an alternative are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from parlay.types import Constraint, Draft, DraftKind, trees

GRAMMAR = "grammar"
"""Source of a token that no drafter proposed: the constraint allowed no other."""


def legal(draft: Draft, constraint: Constraint) -> Draft:
    """The draft without forbidden nodes and their descendants.

    A drawn draft stays whole, because the accept rule rejects forbidden tokens.
    """
    if draft.kind != "point":
        return draft
    tree = trees.without_probes(draft).tree
    kept: set[int] = set()
    for path in trees.leaf_paths(tree):
        kept.update(path[: constraint.legal([tree.tokens[node] for node in path])])
    return draft if len(kept) == len(tree) else trees.prune(draft, sorted(kept))


def with_forced(draft: Draft, forced: Sequence[int], kind: DraftKind, vocab_size: int) -> Draft:
    """The draft with all ``forced`` tokens, which the constraint makes come next.

    If the draft has only some of them, it is cut to their path and lengthened. A drawn draft is not cut: if it has
    nodes beside the path, nothing is added. Where a rule takes only drawn drafts, forced tokens count as drawn with
    probability one.
    """
    path = _along(draft, forced)
    drawn_beside = draft.kind != "point" and len(path) < len(draft)
    if len(path) == len(forced) or drawn_beside:
        return draft
    rest = forced[len(path) :]
    whole = trees.lengthened(trees.prune(draft, path), rest, GRAMMAR)
    if kind == "point":
        return whole
    sure = torch.nn.functional.one_hot(torch.tensor(rest), vocab_size).float()
    probs = sure if draft.probs is None else torch.cat([draft.probs, sure.to(draft.probs)])
    return replace(whole, kind=kind, probs=probs)


def drafters_part(draft: Draft) -> Draft | None:
    """The draft as policies see it, without forced nodes.

    None if forced nodes follow the drafter's nodes: these were then forced too, so they tell nothing about the drafter.
    """
    if GRAMMAR not in draft.sources:
        return draft
    real = range(len(draft) - draft.probes)
    own = [node for node in real if draft.sources[node] != GRAMMAR]
    return None if own else trees.prune(draft, own)


def _along(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """The longest path of nodes from the root whose tokens are the first of ``tokens``."""
    real = range(len(draft) - draft.probes)
    below = {(draft.tree.parents[node], draft.tree.tokens[node]): node for node in reversed(real)}
    path: list[int] = []
    for token in tokens:
        node = below.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path
