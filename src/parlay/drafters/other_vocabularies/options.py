"""Options of the drafters whose model has another tokenizer. They stand apart so that reading them loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.drafters.draft_models.options import MIN_P, MIN_P_HELP, ModelOptions
from parlay.options import option

UNIVERSAL_DRAFT = "universal-draft"
INTERSECTION_DRAFT = "intersection-draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntersectionDraftOptions(ModelOptions):
    """Which model drafts, and where its chains end."""

    min_p: float = option(MIN_P, MIN_P_HELP, low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalDraftOptions(IntersectionDraftOptions):
    """The same, and how much text is encoded again where texts meet."""

    window: int = option(10, "last tokens of the text that are tokenised again with the draft", low=1, high=256)
