"""Medusa (Cai et al. 2024): heads on the target's last state guess one token each, and a static tree combines them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.drafters.heads.state_heads import StateJob, StaticTreeDrafter
from parlay.drafters.options import MEDUSA as SOURCE
from parlay.drafters.options import HeadOptions
from parlay.drafters.resources import Resources
from parlay.heads.base import SeveralHeadsConfig
from parlay.heads.medusa import MedusaHeads
from parlay.heads.opening import opened


class Medusa(StaticTreeDrafter):
    """Medusa-1 (Cai et al. 2024, arXiv:2401.10774); see `StaticTreeDrafter`.

    Every node at one depth has the same candidates: the best tokens of that depth's head. The tokens are verified by
    the strategy's accept rule; the paper's typical acceptance is one of those that can be asked for.
    """

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        held = opened(SOURCE, resources.find_head, options.head).artefact
        self._heads = MedusaHeads(SeveralHeadsConfig.of(held))
        self._heads.load_state_dict(dict(held.tensors))
        self._heads.float().requires_grad_(False)
        super().__init__(held, self._heads.draft_ids)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        """The nodes of a level have the same children, so one product for each sequence is enough."""
        logits_BD = self._heads.head(level, torch.stack([job.state_H for job in jobs]).float())
        return logits_BD.repeat_interleave(torch.tensor([len(job.tree.newest) for job in jobs]), 0)
