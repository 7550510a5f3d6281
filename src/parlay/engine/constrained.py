"""Drafts of a constrained text: none of their nodes is forbidden, and tokens without an alternative come for free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from parlay import trees
from parlay.types import Constraint, Draft, Law

GRAMMAR = "grammar"
"""Source of a token that the constraint left no alternative to, and that no drafter proposed."""


def legal(draft: Draft, constraint: Constraint) -> Draft:
    """The draft without the nodes that are not allowed on their own paths, and without what hangs on them.

    A drawn draft is left whole: the rule rejects what is not allowed.
    """
    if draft.law != "point":
        return draft
    tree = trees.without_probes(draft).tree
    kept: set[int] = set()
    for path in trees.leaf_paths(tree):
        kept.update(path[: constraint.legal([tree.tokens[node] for node in path])])
    return draft if len(kept) == len(tree) else trees.prune(draft, sorted(kept))


def with_forced(draft: Draft, forced: Sequence[int], law: Law, vocab_size: int) -> Draft:
    """The draft with all of the ``forced`` tokens, which are those that must come next.

    As far as they go there is one path, so what lies beside it is dropped where it has to be made longer. A drawn
    draft stays as it is. For rules that take no fixed guesses, forced tokens are draws from a law that is sure of them.
    """
    if not forced or (len(draft) and draft.law != "point"):
        return draft
    path = _along(draft, forced)
    if len(path) == len(forced):
        return draft
    whole = trees.lengthened(trees.prune(draft, path), forced[len(path) :], GRAMMAR)
    if law == "point":
        return whole
    sure = torch.nn.functional.one_hot(torch.tensor(whole.tree.tokens), vocab_size)
    return replace(whole, law=law, probs=sure.float())


def drafters_part(draft: Draft) -> Draft | None:
    """The draft as policies shall see it, without forced nodes. None where these go on after the drafter's.

    The constraint vouched for all nodes then, so nothing can be learnt of a drafter from them.
    """
    if GRAMMAR not in draft.sources:
        return draft
    real = range(len(draft) - draft.probes)
    own = [node for node in real if draft.sources[node] != GRAMMAR]
    return None if own else trees.prune(draft, own)


def _along(draft: Draft, tokens: Sequence[int]) -> list[int]:
    """The nodes that carry the first of ``tokens``, root side first, as far as the draft has them."""
    real = range(len(draft) - draft.probes)
    below = {(draft.tree.parents[node], draft.tree.tokens[node]): node for node in reversed(real)}
    path: list[int] = []
    for token in tokens:
        node = below.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path
