"""What a service is doing now and what it has done, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from parlay.engine import Engine
from parlay.types import EngineStats, Event, FinishReason


class StatsCollector:
    """Counts how samples end, and reads the rest off the engine. Engine thread only.

    A sample whose step failed ends with an error here, while the engine only knows that it was taken out.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._finished: Counter[FinishReason] = Counter()

    def count(self, event: Event) -> None:
        """Something happened to a sample."""
        if event.finish_reason is not None:
            self._finished[event.finish_reason] += 1

    def read(self) -> EngineStats:
        return replace(self._engine.stats(), finished=dict(self._finished))
