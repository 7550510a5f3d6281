"""A drafter that fails. No client may notice it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.resources import Resources
from parlay.options import Options, option
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView, trees


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingOptions(Options):
    """Options: after how many tokens the drafter fails."""

    after: int = option(3, "tokens of output after which it raises", low=0)


class Failing:
    """Proposes the sequence's last tokens again, and raises an error once a request has some tokens."""

    needs = Needs()

    def __init__(self, resources: Resources, options: FailingOptions) -> None:
        self._after = options.after

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [self._guess(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ignore the observations."""

    def release(self, sequence: int) -> None:
        """Do nothing: it keeps no state."""

    def _guess(self, view: SequenceView, budget: int) -> Draft:
        if len(view.tokens) - view.prompt_length >= self._after:
            raise RuntimeError("made to fail")
        return trees.chain(list(view.tokens[-min(budget, 2) :]), "failing") if budget else NO_DRAFT
