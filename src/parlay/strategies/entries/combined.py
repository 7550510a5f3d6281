"""Strategies made of other strategies."""

from __future__ import annotations

from parlay.drafters.combined import union
from parlay.strategies.entry import StrategyEntry

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
)
