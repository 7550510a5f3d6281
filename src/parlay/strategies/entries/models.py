"""Strategies whose drafts a smaller model writes, of the target's vocabulary or of another."""

from __future__ import annotations

from parlay.drafters.draft_models.options import (
    DRAFT_MODEL,
    MERGED_DRAFTS,
    SEQUOIA,
    DraftModelOptions,
    MergedDraftsOptions,
    SequoiaOptions,
)
from parlay.drafters.other_vocabularies.options import (
    INTERSECTION_DRAFT,
    UNIVERSAL_DRAFT,
    IntersectionDraftOptions,
    UniversalDraftOptions,
)
from parlay.strategies import accept_rules
from parlay.strategies.entry import StrategyEntry
from parlay.types import Exactness

ENTRIES: tuple[StrategyEntry, ...] = (
    StrategyEntry(
        name=DRAFT_MODEL,
        family="model",
        training="a small model",
        needs="a model with the target's vocabulary",
        summary="A smaller language model drafts a chain, or a tree of its best guesses.",
        when="a small model with the target's tokenizer exists: any text",
        reference="Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318",
        options=DraftModelOptions,
        k=8,
        rules=(*accept_rules.GUESSED, *accept_rules.DRAWN),
        factory="parlay.drafters.draft_models.draft_model:DraftModel",
        toys=(
            "min_p=0",
            "min_p=0,shape=tree,width=2",
            "rule=rejection,min_p=0.05",
            "rule=block,min_p=0",
            "rule=k-seq,min_p=0,width=2",
            "rule=multi-candidate,min_p=0.05,width=2",
            "rule=without-replacement,min_p=0,shape=beam,width=2",
            "rule=typical,min_p=0",
            "rule=threshold,min_p=0",
        ),
        vllm=("draft_model",),
        arm=1,
    ),
    StrategyEntry(
        name=MERGED_DRAFTS,
        family="model",
        exactness=Exactness.DISTRIBUTION,
        training="small models",
        needs="two or more models with the target's vocabulary",
        summary="Several smaller language models draw a chain each; the chains are merged into one tree.",
        when="several small models, each good at another kind of text; sampled requests",
        reference="Miao et al. 2024 (SpecInfer), arXiv:2305.09781",
        options=MergedDraftsOptions,
        k=8,
        rules=("multi-candidate",),
        factory="parlay.drafters.draft_models.merged_drafts:MergedDrafts",
        toys=("models=parlay-mini+parlay-mini-draft,min_p=0",),
    ),
    StrategyEntry(
        name=SEQUOIA,
        family="model",
        training="a small model",
        needs="a model with the target's vocabulary",
        summary="A smaller model fills the tree shape that is best for the measured acceptance of its guesses by rank.",
        when="verifying many rows is cheap, and drafting is expensive",
        reference="Chen et al. 2024 (Sequoia), arXiv:2402.12374",
        options=SequoiaOptions,
        k=24,
        factory="parlay.drafters.draft_models.sequoia:Sequoia",
        toys=("width=3,level_cost=0",),
    ),
    StrategyEntry(
        name=UNIVERSAL_DRAFT,
        family="model",
        training="a small model",
        needs="a model with any tokenizer, and the target's tokenizer",
        summary="A smaller model with any tokenizer drafts text, which is cut into the target's tokens.",
        when="the only small model has another tokenizer",
        reference="Timor et al. 2025 (SLEM), arXiv:2502.05202; universal assisted generation of transformers",
        options=UniversalDraftOptions,
        k=8,
        factory="parlay.drafters.other_vocabularies.universal_draft:UniversalDraft",
        toys=("min_p=0,window=3",),
    ),
    StrategyEntry(
        name=INTERSECTION_DRAFT,
        family="model",
        training="a small model",
        needs="a model whose vocabulary shares tokens with the target's, and the target's tokenizer",
        summary="A smaller model with another vocabulary drafts with the tokens that both vocabularies have.",
        when="the small model's vocabulary has most of the target's tokens",
        reference="Timor et al. 2025 (TLI), arXiv:2502.05202",
        options=IntersectionDraftOptions,
        k=8,
        factory="parlay.drafters.other_vocabularies.intersection_draft:IntersectionDraft",
        toys=("min_p=0",),
    ),
)
