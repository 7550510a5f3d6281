"""A drafter that fails: what a request must get over without anyone noticing."""

from __future__ import annotations

from collections.abc import Sequence

from parlay import trees
from parlay.drafters.resources import Resources
from parlay.types import NO_DRAFT, Draft, Needs, Observation, View


class Failing:
    """Proposes the sequence's own last tokens again, and raises after some steps of a request."""

    needs = Needs()

    def __init__(self, resources: Resources, *, after: int = 3) -> None:
        self._after = after

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Draft]:
        return [self._guess(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learns nothing."""

    def release(self, sequence: int) -> None:
        """Holds nothing."""

    def _guess(self, view: View, budget: int) -> Draft:
        if len(view.tokens) - view.prompt_length >= self._after:
            raise RuntimeError("made to fail")
        return trees.chain(list(view.tokens[-min(budget, 2) :]), "failing") if budget else NO_DRAFT
