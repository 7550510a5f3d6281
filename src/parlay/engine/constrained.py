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

    As far as they go there is one path, so what lies beside it is dropped where it has to be made longer. What was
    drawn beside it stays, and then nothing is added. Rules that take draws alone, of this ``law``, get forced tokens
    as draws from laws that are sure of them.
    """
    path = _along(draft, forced)
    drawn_beside = draft.law != "point" and len(path) < len(draft)
    if len(path) == len(forced) or drawn_beside:
        return draft
    rest = forced[len(path) :]
    whole = trees.lengthened(trees.prune(draft, path), rest, GRAMMAR)
    if law == "point":
        return whole
    sure = torch.nn.functional.one_hot(torch.tensor(rest), vocab_size)
    return replace(whole, law=law, probs=sure.float() if draft.probs is None else torch.cat([draft.probs, sure]))


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
