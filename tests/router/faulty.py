"""A drafter that copies well until it raises or becomes slow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.copying.prompt_lookup import PromptLookup, PromptLookupOptions
from parlay.drafters.resources import Resources
from parlay.options import Options, option
from parlay.types import Draft, Needs, Observation, SequenceView

NEVER = 1 << 30


class Clock:
    """Return `time.perf_counter` plus the seconds that `Faulty` adds, as if its proposals took so long."""

    added = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.added


CLOCK = Clock()
"""The engine's clock, to which `Faulty` adds time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyOptions(Options):
    """Options: the call in which the drafter fails."""

    raises: int = option(NEVER, "proposals after which it raises", low=0)
    slows: int = option(NEVER, "proposals after which each takes a second", low=0)


class Faulty:
    """Drafts by copying from the text, until it raises an error or becomes slow."""

    needs = Needs()

    def __init__(self, resources: Resources, options: FaultyOptions) -> None:
        self._options, self._asked = options, 0
        self._copies = PromptLookup(resources, PromptLookupOptions())

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._asked += 1
        if self._asked > self._options.raises:
            raise RuntimeError("made to fail")
        if self._asked > self._options.slows:
            CLOCK.added += 1.0
        return self._copies.propose(views, budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Ignore the observations."""

    def release(self, sequence: int) -> None:
        self._copies.release(sequence)
