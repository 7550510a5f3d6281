"""The meter: exact joules per emitted token, through wrap-arounds and nesting; and never a 0 that means "too short"."""

from __future__ import annotations

import random

import pytest

from parlay.cost.energy import Counter, Energy, EnergyMeter, TooShort, joules_per_token
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing.conformance.stage import StageRequest, decode
from parlay.testing.toy_drafters import answer_by, sometimes
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import Metrics, SamplingParams, Strategy

WATTS = 50.0


class Hardware:
    """A counter in millijoules under constant power, and the clock that goes with it."""

    def __init__(self, most: int | None = None, start: int = 0, period: float = 0.0) -> None:
        self.now = 0.0
        self._most, self._start, self._period = most, start, period

    def counts(self) -> int:
        now = self.now if not self._period else self.now // self._period * self._period
        total = self._start + round(now * WATTS * 1000)
        return total if self._most is None else total % (self._most + 1)

    def meter(self, *more: Counter) -> EnergyMeter:
        counter = Counter("GPU 0", self.counts, 1e-3, self._most)
        return EnergyMeter([counter, *more], "a fake counter", clock=lambda: self.now)


def test_constant_power_gives_exact_joules_per_emitted_token() -> None:
    """Rejected drafts cost energy and are no tokens: what is counted is what was emitted."""
    logits = RandomLogits(24)
    drafter = sometimes(answer_by(logits), 24, [True, False, True])
    strategy = Strategy("sometimes", (drafter,), SharedNoise(), Fixed(4))
    hardware = Hardware()
    meter = hardware.meter()
    window = meter.begin()
    asks = [StageRequest((3, 1, 4 + number), SamplingParams(temperature=0.0, max_tokens=20)) for number in range(3)]
    samples = decode(ToyRunner(logits, 24), [(ask, strategy) for ask in asks])
    hardware.now += 6.0
    energy = meter.end(window)
    emitted = sum(len(sample.tokens) for sample in samples)
    assert sum(sample.metrics.draft_tokens for sample in samples) > sum(
        sample.metrics.accepted_tokens for sample in samples
    )
    assert (energy.joules, energy.seconds, energy.includes) == (pytest.approx(300.0), 6.0, ("GPU 0",))
    assert joules_per_token(energy, [sample.metrics for sample in samples]) == pytest.approx(300.0 / emitted)


def test_a_counter_that_wraps_around_loses_nothing() -> None:
    hardware = Hardware(most=99_999, start=99_000)
    meter = hardware.meter()
    window = meter.begin()
    hardware.now += 1.0
    assert meter.end(window).joules == pytest.approx(WATTS)


def test_readings_in_between_count_every_round() -> None:
    """Each round of a counter that anyone reads in is summed up, also by windows around it."""
    hardware = Hardware(most=99_999)
    meter = hardware.meter()
    outer = meter.begin()
    for _ in range(10):  # each half a round
        inner = meter.begin()
        hardware.now += 1.0
        meter.end(inner)
    assert meter.end(outer).joules == pytest.approx(10 * WATTS)


def test_a_counter_that_did_not_move_is_too_short_a_window_and_not_0_joules() -> None:
    hardware = Hardware(period=0.1)
    meter = hardware.meter()
    window = meter.begin()
    hardware.now += 0.05
    with pytest.raises(TooShort, match=r"counter of GPU 0 did not move in 0\.050 s"):
        meter.end(window)
    hardware.now += 0.1  # the window is still good, once it is long enough
    assert meter.end(window).joules == pytest.approx(0.1 * WATTS)


def test_one_counter_of_several_that_did_not_move_is_named() -> None:
    hardware = Hardware()
    meter = hardware.meter(Counter("dram", lambda: 7, 1e-6))
    window = meter.begin()
    hardware.now += 1.0
    with pytest.raises(TooShort, match="counter of dram"):
        meter.end(window)


def test_nested_windows_sum_up_to_no_more_than_the_outer_one() -> None:
    chance = random.Random(0)
    hardware = Hardware(most=200_000, start=150_000, period=0.02)
    meter = hardware.meter()
    for _ in range(20):
        outer, parts = meter.begin(), 0.0
        for _ in range(5):
            hardware.now += chance.random()
            inner = meter.begin()
            hardware.now += 0.1 + chance.random()
            parts += meter.end(inner).joules or 0.0
        assert 0 < parts <= (meter.end(outer).joules or 0.0) + 1e-9


def test_counters_are_read_after_what_runs_on_its_own_has_ended() -> None:
    order: list[str] = []

    def read() -> int:
        order.append("read")
        return len(order)

    meter = EnergyMeter([Counter("GPU 0", read, 1.0)], "", settle=lambda: order.append("settled"))
    order.clear()
    meter.end(meter.begin())
    assert order == ["settled", "read", "settled", "read"]


def test_without_counters_there_is_a_reason_and_no_number() -> None:
    meter = EnergyMeter([], "no counter here")
    energy = meter.end(meter.begin())
    assert (energy.joules, energy.includes, energy.reason) == (None, (), "no counter here")
    assert joules_per_token(energy, [Metrics(strategy="none", exactness="bits", completion_tokens=1)]) is None


def test_joules_per_token_of_nothing_are_an_error() -> None:
    with pytest.raises(ValueError, match="no tokens were emitted"):
        joules_per_token(Energy(1.0, 1.0, ("GPU 0",), ""), [])
