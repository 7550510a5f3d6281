"""Strategies in which one drafter drafts for another."""

from __future__ import annotations

from parlay.drafters.combined.options import (
    CASCADE,
    CS_DRAFTING,
    HORIZONTAL,
    CascadeOptions,
    CsDraftingOptions,
    HorizontalOptions,
)
from parlay.strategies.entry import StrategyEntry

ENTRIES: tuple[StrategyEntry, ...] = (
    StrategyEntry(
        name=CASCADE,
        family="cascade",
        training="that of its levels",
        needs="what its levels need; by default a draft model",
        summary="A cheap drafter drafts for a small model, that model for a larger one, the last one for the target.",
        when="the draft model is itself slow enough to be worth speeding up",
        reference="Spector and Re 2023 (staged speculative decoding), arXiv:2308.04623; "
        "Chen et al. 2023 (CS Drafting, vertical), arXiv:2312.11462",
        options=CascadeOptions,
        k=16,
        factory="parlay.drafters.combined.cascade:Cascade",
        toys=(
            "levels=prompt-lookup(k=3)+draft-model(min_p=0)+draft-model(k=16,min_p=0,model=other,shape=tree,width=2)",
        ),
    ),
    StrategyEntry(
        name=HORIZONTAL,
        family="cascade",
        training="that of its levels",
        needs="what its levels need; by default a draft model",
        summary="The most expensive drafter writes the first tokens of a draft, and cheaper ones continue it.",
        when="a model should write the first tokens and a cheap drafter the rest",
        reference="Chen et al. 2023 (CS Drafting, horizontal), arXiv:2312.11462",
        options=HorizontalOptions,
        k=15,
        factory="parlay.drafters.combined.horizontal:horizontal",
        toys=("levels=draft-model(k=3,min_p=0,shape=tree,width=2)+prompt-lookup",),
    ),
    StrategyEntry(
        name=CS_DRAFTING,
        family="cascade",
        training="that of its drafters",
        needs="what its drafters need; by default a draft model",
        summary="Vertical and horizontal cascades of several drafters, given by one matrix of draft lengths.",
        when="several drafters of different cost, combined by hand",
        reference="Chen et al. 2023 (CS Drafting), arXiv:2312.11462",
        options=CsDraftingOptions,
        k=32,
        factory="parlay.drafters.combined.cs_drafting:cs_drafting",
        toys=("drafters=draft-model(min_p=0)+draft-model(model=other,min_p=0)+prompt-lookup,matrix=2/4/3+0/1/3+0/0/3",),
    ),
)
