"""Chains of several draft models, verified as one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from parlay.drafters.draft_models.draft_model import DraftModel
from parlay.drafters.options import MERGED_DRAFTS as SOURCE
from parlay.drafters.options import DraftModelOptions, MergedDraftsOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.types import NO_DRAFT, Draft, SequenceView, Tree


class MergedDrafts(FromText):
    """Merged drafts of several small models (SpecInfer, Miao et al. 2024, arXiv:2305.09781).

    Each model draws a chain from its own distribution, starting at the root, and gets an equal part of the budget. At
    each node the target tries the tokens of all models that agree with the text so far, in the order of ``models``,
    each against the distribution it was drawn from. Equal tokens of two models share one node, below which both models
    continue. A chain ends where its path probability falls below ``min_p``.
    """

    def __init__(self, resources: Resources, options: MergedDraftsOptions) -> None:
        if len(options.models) < 2 or len(set(options.models)) < len(options.models):
            raise UsageError(
                f"strategy {SOURCE}: models={'+'.join(options.models)} must name two or more different models"
            )
        self._names = options.models
        self._members = [
            DraftModel(
                replace(resources, rule="rejection"), DraftModelOptions(model=name, min_p=options.min_p), lane=lane
            )
            for lane, name in enumerate(options.models)
        ]

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        count = len(self._members)
        parts = [
            member.propose(views, [(budget + count - 1 - place) // count for budget in budgets])
            for place, member in enumerate(self._members)
        ]
        return [self._merged(chains) for chains in zip(*parts, strict=True)]

    def _merged(self, chains: Sequence[Draft]) -> Draft:
        """Interleave the chains level by level, so that a cut shortens all of them alike."""
        order = sorted((depth, member) for member, chain in enumerate(chains) for depth in range(len(chain)))
        if not order:
            return NO_DRAFT
        place = {(depth, member): node for node, (depth, member) in enumerate(order)}
        probs = [chains[member].probs for _, member in order]
        return Draft(
            Tree(
                tuple(chains[member].tree.tokens[depth] for depth, member in order),
                tuple(place.get((depth - 1, member), -1) for depth, member in order),
            ),
            kind="iid",
            sources=tuple(self._names[member] for _, member in order),
            scores=tuple(chains[member].scores[depth] for depth, member in order),
            probs=torch.stack(
                [
                    distribution[depth]
                    for distribution, (depth, _) in zip(probs, order, strict=True)
                    if distribution is not None
                ]
            ),
        )

    def release(self, sequence: int) -> None:
        for member in self._members:
            member.release(sequence)
