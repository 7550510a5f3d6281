"""The base class of drafters that look at one sequence at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from parlay.types import NO_DRAFT, Draft, Drafter, Needs, Observation, SequenceView


class OneByOne(Drafter):
    """Proposes for each sequence separately and reads its committed tokens only.

    A subclass that learns from steps too overrides ``needs`` and `observe`.
    """

    needs = Needs(outcomes=False)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        pairs = zip(views, budgets, strict=True)
        return [self._propose(view, budget) if budget > 0 else NO_DRAFT for view, budget in pairs]

    @abstractmethod
    def _propose(self, view: SequenceView, budget: int) -> Draft:
        """A draft of at most ``budget`` nodes, which is 1 or more."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learns nothing here: `propose` reads the committed tokens."""
