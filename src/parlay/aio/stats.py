"""What a service is doing now and what it has done, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from parlay.engine import Engine
from parlay.types import Event, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStats:
    """A snapshot, a step old at most. Samples are counted, so a request with ``n=3`` is three.

    ``prefix_tokens_found`` of ``prefix_tokens_asked`` prompt tokens were in the cache already. ``finished`` counts by
    reason, since the start, as do ``preemptions`` and ``drafter_faults`` (drafters that raised and were dropped).
    """

    waiting: int = 0
    running: int = 0
    preemptions: int = 0
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    cache_tokens_used: int = 0
    cache_tokens_total: int = 0
    prefix_tokens_asked: int = 0
    prefix_tokens_found: int = 0
    drafter_faults: int = 0


class Ledger:
    """Counts what ends in the engine, and reads the rest off it. Engine thread only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._finished: Counter[FinishReason] = Counter()
        self._asked = 0
        self._found = 0
        self._faults = 0

    def count(self, event: Event) -> None:
        """A sample is over."""
        if event.finish_reason is None or event.metrics is None:
            return
        self._finished[event.finish_reason] += 1
        self._asked += event.metrics.prompt_tokens
        self._found += event.metrics.cached_tokens
        self._faults += event.metrics.drafter_faults

    def read(self) -> ServiceStats:
        scheduler = self._engine.scheduler
        used = sum(sequence.cached for sequence in scheduler.running)
        return ServiceStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            preemptions=scheduler.preemptions,
            finished=dict(self._finished),
            cache_tokens_used=used,
            cache_tokens_total=used + self._engine.runner.room(),
            prefix_tokens_asked=self._asked,
            prefix_tokens_found=self._found,
            drafter_faults=self._faults,
        )
