"""Strategies made of other strategies, including cascades, in which one drafter drafts for another."""

from __future__ import annotations

from parlay.drafters import options as methods
from parlay.drafters.combined import union
from parlay.strategies.entry import RoutingOptions, StrategyEntry

ENTRIES: tuple[StrategyEntry, ...] = (
    StrategyEntry(
        name=union.SOURCE,
        family="combined",
        training="that of its members",
        needs="what its members need: by default, a draft model",
        summary="Several drafters propose into one tree; each node is credited to the drafter that proposed it.",
        when="you don't know which drafter suits the text",
        reference="Miao et al. 2024 (SpecInfer, merged trees), arXiv:2305.09781",
        options=union.UnionOptions,
        factory="parlay.drafters.combined.union:Union",
    ),
    StrategyEntry(
        name="auto",
        family="combined",
        training="that of the drafters that it chooses from",
        needs="nothing; it uses what exists for the target",
        summary="Chooses at each step the drafter that saves most time and the size of its draft, or no draft.",
        when="you don't know which drafter suits the text, or the text changes; this is the default",
        reference="goodput: Liu et al. 2024, arXiv:2406.14066; scoring all drafters: HedgeSpec, arXiv:2510.20064",
        options=RoutingOptions,
        routes=True,
        toys=("of=prompt-lookup+suffix-decoding+draft-model", "of=token-recycling+eagle3(min_p=0)+lookahead"),
    ),
    StrategyEntry(
        name=methods.CASCADE,
        family="cascade",
        training="that of its levels",
        needs="what its levels need; by default a draft model",
        summary="Lets a cheap drafter draft for a small model, that one for a larger model, the last for the target.",
        when="the draft model is slow, and drafts for itself save time",
        reference="Spector and Re 2023 (staged speculative decoding), arXiv:2308.04623; "
        "Chen et al. 2023 (CS Drafting, vertical), arXiv:2312.11462",
        options=methods.CascadeOptions,
        factory="parlay.drafters.combined.cascade:Cascade",
        toys=(
            "levels=prompt-lookup(k=3)+draft-model(min_p=0)+draft-model(k=16,min_p=0,model=other,shape=tree,width=2)",
        ),
    ),
    StrategyEntry(
        name=methods.HORIZONTAL,
        family="cascade",
        training="that of its levels",
        needs="what its levels need; by default a draft model",
        summary="The most expensive drafter writes the first tokens of a draft, and cheaper ones continue it.",
        when="a model should write a draft's first tokens, and a cheap drafter the rest",
        reference="Chen et al. 2023 (CS Drafting, horizontal), arXiv:2312.11462",
        options=methods.HorizontalOptions,
        k=15,
        factory="parlay.drafters.combined.horizontal:horizontal",
        toys=("levels=draft-model(k=3,min_p=0,shape=tree,width=2)+prompt-lookup",),
    ),
    StrategyEntry(
        name=methods.CS_DRAFTING,
        family="cascade",
        training="that of its drafters",
        needs="what its drafters need; by default a draft model",
        summary="Combines vertical and horizontal cascades of several drafters by a matrix of draft lengths.",
        when="you combine drafters of different cost by hand",
        reference="Chen et al. 2023 (CS Drafting), arXiv:2312.11462",
        options=methods.CsDraftingOptions,
        k=32,
        factory="parlay.drafters.combined.cs_drafting:cs_drafting",
        toys=("drafters=draft-model(min_p=0)+draft-model(model=other,min_p=0)+prompt-lookup,matrix=2/4/3+0/1/3+0/0/3",),
    ),
)
