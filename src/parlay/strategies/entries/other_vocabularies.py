"""Strategies whose draft model has another tokenizer."""

from __future__ import annotations

from parlay.drafters.other_vocabularies.options import (
    INTERSECTION_DRAFT,
    UNIVERSAL_DRAFT,
    IntersectionDraftOptions,
    UniversalDraftOptions,
)
from parlay.strategies.entry import StrategyEntry

ENTRIES = (
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
