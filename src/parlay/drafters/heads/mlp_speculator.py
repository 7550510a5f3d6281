"""IBM's MLP speculator (Wertheimer et al. 2024): small steps that carry a state along the drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.drafters.heads.state_heads import StateJob, StaticTreeDrafter, carried_of_rows, carry
from parlay.drafters.options import MLP_SPECULATOR as SOURCE
from parlay.drafters.options import HeadOptions
from parlay.drafters.resources import Resources
from parlay.heads.mlp_speculator import MlpSpeculator
from parlay.heads.opening import opened


class MlpSpeculatorDrafter(StaticTreeDrafter):
    """The MLP speculator (Wertheimer et al. 2024, arXiv:2404.19124); see `StaticTreeDrafter`.

    A node's state follows from its parent's and from its own token, so each level is one product for all its nodes.
    """

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        held = opened(SOURCE, resources.find_head, options.head).artefact
        self._speculator = MlpSpeculator.of(held)
        self._speculator.load_state_dict(dict(held.tensors))
        self._speculator.float().requires_grad_(False)
        super().__init__(held, self._speculator.draft_ids)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        above_NH = carried_of_rows(jobs)
        if level == 0:
            above_NH = self._speculator.begin(above_NH)
        ids_N = torch.tensor([token for job in jobs for token in job.newest_tokens()])
        states_NH = self._speculator.advance(level, above_NH, ids_N)
        carry(jobs, states_NH)
        return self._speculator.read(level, states_NH)
