"""Strategies in which the target drafts for itself with some of its layers."""

from __future__ import annotations

from functools import partial

from parlay.drafters import options as methods
from parlay.strategies.entry import StrategyEntry

_NEEDS = "a target whose layers can be skipped (the native decoder)"
_self = partial(StrategyEntry, family="self")

ENTRIES = (
    _self(
        name=methods.LAYER_SKIP,
        training="none",
        needs=_NEEDS,
        summary="The target drafts for itself, with some attention and MLP blocks skipped.",
        when="the target has many layers, and no draft model exists",
        reference="Zhang et al. 2023 (Draft & Verify), arXiv:2309.08168",
        options=methods.LayerSkipOptions,
        k=8,
        factory="parlay.drafters.self_speculation.layer_skip:LayerSkip",
        toys=("search=12,window=4",),
    ),
    _self(
        name=methods.EARLY_EXIT,
        training="the target itself (parlay train early-exit), or one that was published so",
        needs=_NEEDS,
        summary="The target drafts with its first layers: its last norm and LM head read an early layer.",
        when="the target was trained with early exits, like LayerSkip's models",
        reference="Elhoushi et al. 2024 (LayerSkip), arXiv:2404.16710",
        options=methods.EarlyExitOptions,
        k=6,
        factory="parlay.drafters.self_speculation.early_exit:EarlyExit",
        toys=("exit=1",),
    ),
    _self(
        name=methods.SWIFT,
        training="none",
        needs=_NEEDS,
        summary="The target drafts with some layers skipped, and searches while decoding for the best ones to skip.",
        when="the target has many layers, no draft model exists, and outputs are long and of one kind",
        reference="Xia et al. 2024 (SWIFT), arXiv:2410.06916",
        options=methods.SwiftOptions,
        k=25,
        factory="parlay.drafters.self_speculation.swift:Swift",
        toys=("window=4,every=3,width=3",),
    ),
    _self(
        name=methods.SELF_DRAFT,
        training="none",
        needs="Parlay's compiled decoder (CPU), in one process",
        summary="The target drafts for itself with weights of fewer bits, or with some of its cached keys.",
        when="weights have 16 or 8 bits and no draft model exists (`bits`), or texts are long (`window`, `keys`)",
        reference="Sadhukhan et al. 2024 (MagicDec), arXiv:2408.11049; Li et al. 2024 (SnapKV), arXiv:2404.14469",
        options=methods.SelfDraftOptions,
        k=8,
        factory="parlay.drafters.self_speculation.self_draft:SelfDraft",
        toys=("bits=4",),
    ),
    _self(
        name=methods.SET_BLOCK,
        arm=1,
        training="the target itself or an adapter for it (parlay train set-block), or one that was published so",
        needs="a target that writes token by token and fills masked places, or an adapter for masked places",
        summary="The target drafts at masked places, which the forward that verifies a draft also computes.",
        when="the target writes both ways, like Nemotron-Labs-Diffusion and models of parlay train set-block",
        reference="Liu et al. 2025 (TiDAR), arXiv:2511.08923; Gat et al. 2025, arXiv:2509.04185",
        options=methods.SetBlockOptions,
        factory="parlay.drafters.self_speculation.set_block:SetBlock",
        toys=("", "groups=1,width=1"),
        fills=True,
    ),
)
