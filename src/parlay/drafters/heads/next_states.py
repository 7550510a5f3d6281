"""Drafters whose layer predicts the target's next hidden state: EAGLE, EAGLE-2, and multi-token prediction.

The layer reads the state before it and the embedding of the token between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from parlay.drafters.draft_models.static_trees import best_tree
from parlay.drafters.heads.layer_heads import LayerHeadDrafter, TreeLimits
from parlay.drafters.heads.level_trees import DynamicTree, Guessing, RankTree
from parlay.drafters.options import EAGLE, EAGLE2, MTP, DynamicTreeOptions, HeadOptions
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateRoom
from parlay.heads.artefact import HeadArtefact
from parlay.heads.eagle import EagleHead
from parlay.heads.layouts.layout import LM_HEAD
from parlay.heads.mtp import MtpModule
from parlay.heads.native import eagle_decoder, mtp_decoder
from parlay.heads.opening import OpenHead, opened
from parlay.models.config import DecoderConfig
from parlay.models.weights.fused import Operand

_Module: TypeAlias = EagleHead | MtpModule
_Decoder = Callable[[DecoderConfig, Mapping[str, Operand], Operand], tuple[DecoderConfig, dict[str, Operand]]]


class _NextStates(LayerHeadDrafter):
    """The base of these drafters: the layer runs on native kernels, and what precedes it in torch."""

    def __init__(
        self, source: str, head: OpenHead, module: _Module, decoder: _Decoder, growth: TreeLimits, *, room: StateRoom
    ) -> None:
        artefact = head.artefact
        module.load_state_dict(dict(artefact.without(LM_HEAD).tensors))
        runner = head.runner(artefact.method, partial(decoder, artefact.layer, artefact.operands, head.embedding))
        guessing = Guessing(module.draft_ids)
        fuse, embedding_VH = module.float().requires_grad_(False).fuse, head.embedding_VH

        def from_target(features_KF: Tensor, tokens: Sequence[int]) -> Tensor:
            return fuse(features_KF.float(), embedding_VH[torch.tensor(tokens)].float()).to(head.dtype)

        super().__init__(source, runner, artefact, guessing, growth, from_target=from_target, room=room)

    def _from_itself(self, hidden_KH: Tensor, tokens: Sequence[int]) -> Tensor:
        return self._from_target(hidden_KH, tokens)


class Eagle(_NextStates):
    """EAGLE (Li et al. 2024, arXiv:2401.15077); see `LayerHeadDrafter`.

    The shape of a tree follows from how often each rank was right at each depth on held-out texts: a tree of n nodes
    has the n paths with the highest products.
    """

    def __init__(self, resources: Resources, options: HeadOptions) -> None:
        head = opened(EAGLE, resources.find_head, options.head)
        self._acceptance: list[list[float]] = head.artefact.settings["acceptance"]
        growth = TreeLimits(len(self._acceptance), len(self._acceptance[0]))
        super().__init__(EAGLE, head, eagle_module(head.artefact), eagle_decoder, growth, room=resources.room)

    def _tree(self, budget: int) -> RankTree:
        return RankTree(best_tree(self._acceptance, budget, len(self._acceptance)))


class _Dynamic(_NextStates):
    """A drafter of this kind whose trees grow where the head is surest."""

    def __init__(
        self,
        source: str,
        head: OpenHead,
        module: _Module,
        decoder: _Decoder,
        options: DynamicTreeOptions,
        *,
        room: StateRoom,
    ) -> None:
        growth = TreeLimits(options.depth, options.width, options.width * options.depth)
        super().__init__(source, head, module, decoder, growth, room=room)
        self._options = options

    def _tree(self, budget: int) -> DynamicTree:
        return DynamicTree(self._options.width, self._options.min_p, budget)


class Eagle2(_Dynamic):
    """EAGLE-2 (Li et al. 2024, arXiv:2406.16858): EAGLE's head; its trees grow where the head is surest."""

    def __init__(self, resources: Resources, options: DynamicTreeOptions) -> None:
        head = opened(EAGLE2, resources.find_head, options.head, method=EAGLE)
        super().__init__(EAGLE2, head, eagle_module(head.artefact), eagle_decoder, options, room=resources.room)


class SequentialMtp(_Dynamic):
    """A module of multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437) that is used again for each depth."""

    def __init__(self, head: OpenHead, options: DynamicTreeOptions, room: StateRoom) -> None:
        module = MtpModule.of(head.artefact)
        super().__init__(MTP, head, module, mtp_decoder, options, room=room)
        self._again = module.again

    def _from_itself(self, hidden_KH: Tensor, tokens: Sequence[int]) -> Tensor:
        return self._from_target(self._again(hidden_KH.float()), tokens)


def eagle_module(artefact: HeadArtefact) -> EagleHead:
    """An EAGLE head of the right shape, without weights yet."""
    return EagleHead(artefact.layer, len(artefact.tensors["d2t"]))
