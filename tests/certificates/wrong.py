"""A drafter that is always wrong, and a lossy strategy that accepts its drafts."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.resources import Resources
from parlay.trees import chain
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView


class Wrong:
    """Drafts one token, whatever the text."""

    needs = Needs(outcomes=False)

    def __init__(self, resources: Resources) -> None:
        pass

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [chain([99], "wrong") for _ in views]

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def release(self, sequence: int) -> None: ...


EXACT = f"{__name__}:Wrong:policy=fixed"
WRONG = f"{EXACT},rule=threshold,threshold.beta=100000,threshold.tau=300.0"


class WrongAlone(Wrong):
    """Drafts for a sequence alone, and nothing for several at once, as an adaptive policy would."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return super().propose(views, budgets) if len(views) == 1 else [NO_DRAFT] * len(views)


WRONG_ALONE = WRONG.replace(":Wrong:", ":WrongAlone:")
