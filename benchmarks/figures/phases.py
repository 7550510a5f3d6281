"""Measures the time of each part of an engine step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from parlay.engine import Engine, Limits
from parlay.types import Cost, Event, Runner

P = ParamSpec("P")
R = TypeVar("R")

PARTS = ("_propose", "_verify", "_accept", "_commit", "_observe")
"""The methods that `Engine.step` calls. The rest of a step is scheduling, counting and events."""


class TimedEngine(Engine):
    """An engine that records, in ``log``, the seconds of each whole step (``step``) and of each part of it."""

    def __init__(self, runner: Runner, cost: Cost, limits: Limits | None = None) -> None:
        super().__init__(runner, cost, limits)
        self.log: list[dict[str, float]] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        for name in PARTS:
            setattr(self, name, self._timed(name.strip("_"), getattr(self, name)))

    def step(self) -> list[Event]:
        self._seconds.clear()
        began = time.perf_counter()
        events = super().step()
        self.log.append({"step": time.perf_counter() - began, **self._seconds})
        return events

    def time_forward(self) -> None:
        """Record the runner's forwards, too, as ``forward``. No other engine may use the runner from then on."""
        setattr(self.runner, "forward", self._timed("forward", self.runner.forward))  # noqa: B010 (a method)

    def _timed(self, name: str, method: Callable[P, R]) -> Callable[P, R]:
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self._seconds[name] += time.perf_counter() - began

        return call
