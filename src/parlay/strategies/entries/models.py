"""Strategies in which a smaller model writes ahead."""

from __future__ import annotations

from parlay.drafters.draft_models.options import DRAFT_MODEL, MERGED_DRAFTS, DraftModelOptions, MergedDraftsOptions
from parlay.strategies import accept_rules
from parlay.strategies.entry import StrategyEntry
from parlay.types import Exactness

ENTRIES = (
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
)
