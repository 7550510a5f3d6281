"""Drafters with small heads that each read the target's last state and guess one token: Medusa, Hydra and others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from parlay.drafters.heads.level_trees import BeamTree
from parlay.drafters.heads.state_heads import (
    StateHeadDrafter,
    StateJob,
    StaticTreeDrafter,
    carried_of_rows,
    carry,
    states_of_rows,
)
from parlay.drafters.heads.states import LayerOutputs
from parlay.drafters.options import HYDRA, MEDUSA, MLP_SPECULATOR, REDRAFTER, BeamOptions, HeadOptions
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateRoom
from parlay.heads.base import SeveralHeadsConfig
from parlay.heads.hydra import HydraHeads
from parlay.heads.medusa import MedusaHeads
from parlay.heads.mlp_speculator import MlpSpeculator
from parlay.heads.native import prefix_decoder
from parlay.heads.opening import OpenHead, opened
from parlay.heads.redrafter import ReDrafterHead
from parlay.models.weights.fused import as_tensor


class Medusa(StaticTreeDrafter):
    """Medusa-1 (Cai et al. 2024, arXiv:2401.10774); see `StaticTreeDrafter`.

    All nodes at one depth have the same candidates: the best tokens of that depth's head. The strategy's accept rule
    verifies the tokens; the paper's typical acceptance is one of the rules.
    """

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        artefact = opened(MEDUSA, resources.find_head, options.head).artefact
        self._heads = MedusaHeads(SeveralHeadsConfig.of(artefact))
        self._heads.load_state_dict(dict(artefact.tensors))
        self._heads.float().requires_grad_(False)
        super().__init__(artefact, self._heads.draft_ids)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        """The logits of a level. Its nodes have the same children, so one product per sequence is enough."""
        logits_BD = self._heads.head(level, torch.stack([job.state_H for job in jobs]).float())
        return logits_BD.repeat_interleave(torch.tensor([len(job.tree.newest) for job in jobs]), 0)


class Hydra(StaticTreeDrafter):
    """Hydra (Ankner et al. 2024, arXiv:2402.05109); see `StaticTreeDrafter`.

    A head reads the root and the path above its tokens, so each level of a tree takes one product for all nodes with
    children. The heads of Hydra++ read the output of their prefix layer instead of the target's own state.
    """

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        head = opened(HYDRA, resources.find_head, options.head)
        artefact, heads = head.artefact, HydraHeads.of(head.artefact)
        heads.load_state_dict(dict(artefact.tensors))
        self._heads = heads.float().requires_grad_(False).heads
        self._embedding_VH = head.embedding_VH
        states = None if heads.prefix is None else _prefix_states(head, resources.room)
        super().__init__(artefact, heads.draft_ids, states)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        paths = [[job.view.tokens[-1], *job.tree.path_tokens(node)] for job in jobs for node in job.tree.newest]
        embedded_NK = self._embedding_VH[torch.tensor(paths)].float().flatten(1)
        logits_ND: Tensor = self._heads[level](states_of_rows(jobs), embedded_NK)
        return logits_ND


def _prefix_states(head: OpenHead, room: StateRoom) -> LayerOutputs:
    artefact = head.artefact
    runner = head.runner("prefix", partial(prefix_decoder, artefact.layer, artefact.operands, head.embedding))
    return LayerOutputs(runner, artefact.settings["taps"], lambda each_KF, _: each_KF.to(head.dtype), room)


class MlpSpeculatorDrafter(StaticTreeDrafter):
    """The MLP speculator (Wertheimer et al. 2024, arXiv:2404.19124); see `StaticTreeDrafter`.

    A node's state follows from its parent's state and its own token, so each level takes one product for all its nodes.
    """

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        artefact = opened(MLP_SPECULATOR, resources.find_head, options.head).artefact
        self._speculator = MlpSpeculator.of(artefact)
        self._speculator.load_state_dict(dict(artefact.tensors))
        self._speculator.float().requires_grad_(False)
        super().__init__(artefact, self._speculator.draft_ids)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        above_NH = carried_of_rows(jobs)
        if level == 0:
            above_NH = self._speculator.begin(above_NH)
        ids_N = torch.tensor([token for job in jobs for token in job.newest_tokens()])
        states_NH = self._speculator.advance(level, above_NH, ids_N)
        carry(jobs, states_NH)
        return self._speculator.read(level, states_NH)


class ReDrafter(StateHeadDrafter):
    """ReDrafter (Zhang et al. 2024, arXiv:2403.09919), with beam search; beams with the same beginning share nodes.

    The paper takes the longest accepted beam. Here the strategy's accept rule walks the merged tree, so the text is
    that of plain decoding.
    """

    def __init__(self, resources: Resources, options: BeamOptions) -> None:
        head = opened(REDRAFTER, resources.find_head, options.head)
        artefact = head.artefact
        self._head, self._width = ReDrafterHead(SeveralHeadsConfig.of(artefact)), options.width
        self._head.load_state_dict(dict(artefact.tensors))
        self._head.float().requires_grad_(False)
        self._embedding_VH = as_tensor(head.embedding, torch.bfloat16)
        self._none_H = torch.zeros(artefact.layer.hidden_size)
        super().__init__(artefact, self._head.draft_ids, options.depth, options.width)

    def _tree(self, budget: int) -> BeamTree:
        return BeamTree(self._width)

    def _logits(self, level: int, jobs: Sequence[StateJob]) -> Tensor:
        ids_N = torch.tensor([token for job in jobs for token in job.newest_tokens()])
        states_NH = self._head.advance(carried_of_rows(jobs, self._none_H), self._embedding_VH[ids_N].float())
        carry(jobs, states_NH)
        return self._head.read(states_of_rows(jobs), states_NH)
