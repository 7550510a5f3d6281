"""The recurrent drafter (Zhang et al. 2024): a small recurrent network writes several beams, merged into one tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.drafters.heads.level_trees import BeamTree
from parlay.drafters.heads.state_heads import StateHeadDrafter, StateJob, carried_of_rows, carry, states_of_rows
from parlay.drafters.options import REDRAFTER as SOURCE
from parlay.drafters.options import BeamOptions
from parlay.drafters.resources import Resources
from parlay.heads.base import SeveralHeadsConfig
from parlay.heads.opening import opened
from parlay.heads.redrafter import ReDrafterHead
from parlay.models.weights.fused import as_tensor


class ReDrafter(StateHeadDrafter):
    """ReDrafter (Zhang et al. 2024, arXiv:2403.09919), with beam search; beams that begin alike share nodes.

    The paper takes the longest accepted beam. Here the strategy's accept rule walks the merged tree, so the text is
    that of plain decoding.
    """

    def __init__(self, resources: Resources, options: BeamOptions) -> None:
        head = opened(SOURCE, resources.find_head, options.head)
        held = head.artefact
        self._head, self._width = ReDrafterHead(SeveralHeadsConfig.of(held)), options.width
        self._head.load_state_dict(dict(held.tensors))
        self._head.float().requires_grad_(False)
        self._embedding_VH = as_tensor(head.embedding, torch.bfloat16)
        self._none_H = torch.zeros(held.layer.hidden_size)
        super().__init__(held, self._head.draft_ids, options.depth, options.width)

    def _tree(self, budget: int) -> BeamTree:
        return BeamTree(self._width)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        ids_N = torch.tensor([token for job in jobs for token in job.newest_tokens()])
        states_NH = self._head.advance(carried_of_rows(jobs, self._none_H), self._embedding_VH[ids_N].float())
        carry(jobs, states_NH)
        return self._head.read(states_of_rows(jobs), states_NH)
