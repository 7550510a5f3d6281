"""Strategies made of other strategies."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

ENTRIES = (
    Entry(
        name="union",
        family="combined",
        exactness=Exactness.BITS,
        training="that of its members",
        needs="what its members need",
        summary="Several drafters propose into one tree; each node is credited to the one that proposed it.",
        when="it is not known which of two drafters fits",
        reference="Miao et al. 2024 (SpecInfer, merged trees), arXiv:2305.09781",
        parameters={
            "of": Parameter(tuple, ("prompt-lookup", "draft-model"), "the drafters, joined by +", strategies=True),
            **budget(16),
        },
        factory="parlay.drafters.combined.union:Union",
    ),
)
