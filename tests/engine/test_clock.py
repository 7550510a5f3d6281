"""The engine's clock is a parameter: all seconds that it reports come from it."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.engine import Engine
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import ToyRunner
from parlay.types import NO_SKIP, NoiseKey, Output, Request, SamplingParams, Segment, Skip
from tests.engine.toy_engine import LOGITS, PLAIN, VOCAB


class _TimedRunner(ToyRunner):
    """Each forward moves the time on by 2 seconds."""

    now = 0.0

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.now += 2.0
        return super().forward(segments, taps, skip)


class _Recorded(Steady):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def record(self, rows: int, context: int, seconds: float) -> None:
        self.seconds.append(seconds)


def test_all_seconds_of_a_step_come_from_the_clock_that_the_engine_is_given() -> None:
    runner, cost = _TimedRunner(LOGITS, VOCAB), _Recorded()
    engine = Engine(runner, cost, clock=lambda: runner.now)
    engine.add(Request(id="one", prompt=(1, 2, 3), params=SamplingParams(max_tokens=5), key=NoiseKey(0)), PLAIN)
    while not engine.idle:
        [event] = engine.step()
    assert event.metrics is not None
    assert event.metrics.prefill_seconds == 2.0
    assert event.metrics.verify_seconds == 8.0
    assert event.metrics.draft_seconds == event.metrics.overhead_seconds == 0.0
    assert cost.seconds == [2.0] * 5
