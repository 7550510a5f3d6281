"""Hydra (Ankner et al. 2024): Medusa's heads, each of which reads the tokens drafted before its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from parlay.drafters.heads.state_heads import StateJob, StaticTreeDrafter, states_of_rows
from parlay.drafters.heads.states import LayerOutputs
from parlay.drafters.options import HYDRA as SOURCE
from parlay.drafters.options import HeadOptions
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateRoom
from parlay.heads.hydra import HydraHeads
from parlay.heads.native import prefix_decoder
from parlay.heads.opening import OpenHead, opened


class Hydra(StaticTreeDrafter):
    """Hydra (Ankner et al. 2024, arXiv:2402.05109); see `StaticTreeDrafter`.

    A head reads the root and the path above its tokens, so each level of a tree is one product for the nodes that have
    children. Heads of Hydra++ read what their prefix layer makes of the text instead of the target's own state.
    """

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        head = opened(SOURCE, resources.find_head, options.head)
        held, heads = head.artefact, HydraHeads.of(head.artefact)
        heads.load_state_dict(dict(held.tensors))
        self._heads = heads.float().requires_grad_(False).heads
        self._embedding_VH = head.embedding_VH
        states = None if heads.prefix is None else _prefix_states(head, resources.room)
        super().__init__(held, heads.draft_ids, states)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        paths = [[job.view.tokens[-1], *job.tree.path_tokens(node)] for job in jobs for node in job.tree.newest]
        embedded_NK = self._embedding_VH[torch.tensor(paths)].float().flatten(1)
        logits_ND: Tensor = self._heads[level](states_of_rows(jobs), embedded_NK)
        return logits_ND


def _prefix_states(head: OpenHead, room: StateRoom) -> LayerOutputs:
    held = head.artefact
    runner = head.runner("prefix", partial(prefix_decoder, held.layer, held.operands, head.embedding))
    return LayerOutputs(runner, held.settings["taps"], lambda each_KF, _: each_KF.to(head.dtype), room)
