"""Strategies made of other strategies."""

from __future__ import annotations

from parlay.drafters.combined import union
from parlay.strategies.entry import RoutingOptions, StrategyEntry

ENTRIES = (
    StrategyEntry(
        name=union.SOURCE,
        family="combined",
        training="that of its members",
        needs="what its members need; by default a draft model",
        summary="Several drafters propose into one tree; each node is credited to the drafter that proposed it.",
        when="it is not known which drafter suits the text",
        reference="Miao et al. 2024 (SpecInfer, merged trees), arXiv:2305.09781",
        options=union.UnionOptions,
        k=16,
        factory="parlay.drafters.combined.union:Union",
    ),
    StrategyEntry(
        name="auto",
        family="combined",
        training="that of the drafters that it chooses from",
        needs="nothing; what exists for the target is used",
        summary="Chooses for each request and step the drafter that pays most, how many nodes it drafts, or none.",
        when="it is not known which drafter suits the text, or that changes within it; the default",
        reference="goodput: Liu et al. 2024, arXiv:2406.14066; scoring all drafters: HedgeSpec, arXiv:2510.20064",
        options=RoutingOptions,
        routes=True,
        toys=("of=prompt-lookup+suffix-decoding+draft-model", "of=token-recycling+eagle3(min_p=0)+lookahead"),
    ),
)
