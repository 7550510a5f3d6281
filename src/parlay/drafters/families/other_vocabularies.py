"""Strategies whose draft model has another tokenizer."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

_MODEL = Parameter(str, "", "draft model, by name or directory; empty: the one that goes with the target")
_MIN_P = Parameter(float, 0.1, "stop where the chance of the drafted path falls below this", low=0, high=1)

ENTRIES = (
    Entry(
        name="universal-draft",
        family="model",
        exactness=Exactness.BITS,
        training="a small model",
        needs="a model with any tokenizer, and the target's tokenizer",
        summary="A smaller model with any tokenizer writes ahead as text, which is cut into the target's tokens.",
        when="the only small model has another tokenizer",
        reference="Timor et al. 2025 (SLEM), arXiv:2502.05202; universal assisted generation of transformers",
        parameters={
            "model": _MODEL,
            "window": Parameter(int, 10, "tokens before a seam that are encoded again with it", low=1, high=256),
            "min_p": _MIN_P,
            **budget(8),
        },
        factory="parlay.drafters.other_vocabularies.universal_draft:UniversalDraft",
        toys=("min_p=0,window=3",),
    ),
    Entry(
        name="intersection-draft",
        family="model",
        exactness=Exactness.BITS,
        training="a small model",
        needs="a model whose vocabulary shares tokens with the target's, and the target's tokenizer",
        summary="A smaller model with another vocabulary writes ahead in the tokens that both have.",
        when="the small model's vocabulary overlaps the target's widely",
        reference="Timor et al. 2025 (TLI), arXiv:2502.05202",
        parameters={"model": _MODEL, "min_p": _MIN_P, **budget(8)},
        factory="parlay.drafters.other_vocabularies.intersection_draft:IntersectionDraft",
        toys=("min_p=0",),
    ),
)
