"""What decoding draws: measured on the runner itself, or an error that says what is missing."""

from __future__ import annotations

import pytest

from parlay.cost.energy import Counter, EnergyMeter
from parlay.cost.energy.power_model import AGAIN_SECONDS, PowerOf, power_of
from parlay.options import UsageError
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import ParlayError

WATTS = 40.0


class Watch:
    """A clock that goes on by a millisecond whenever somebody looks at it: whatever the machine does meanwhile."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


WATCH = Watch()


def use(monkeypatch: pytest.MonkeyPatch, meter: EnergyMeter) -> None:
    monkeypatch.setattr("parlay.cost.energy.power_model.choose_meter", lambda device: meter)
    monkeypatch.setattr("parlay.cost.energy.decoding._SECONDS", 0.02)


def real() -> EnergyMeter:
    counter = Counter("package-0", lambda: round(WATTS * 1e6 * WATCH.now), 1e-6)
    return EnergyMeter([counter], "a counter of constant power", clock=WATCH)


def test_a_runner_is_measured_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, real())
    runner = ToyRunner(RandomLogits(24), 24)
    room = runner.free_tokens()
    found = power_of(runner, Steady())
    assert found.watts == pytest.approx(WATTS, rel=0.05)
    assert found.source == "measured: a counter of constant power"
    assert runner.free_tokens() == room
    runner.check()


def test_a_runner_without_room_is_an_error_that_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, real())
    runner = ToyRunner(RandomLogits(24), 24, capacity=40)
    runner.open(0, (1,))
    assert runner.reserve(0, 20)
    with pytest.raises(ParlayError, match="can't be measured: there is no room for 32 rows; free memory"):
        power_of(runner, Steady())
    runner.check()
    assert runner.free_tokens() == 20


class Stuck:
    """A counter that stands still until it is mended; ``reads`` tells how often somebody looked."""

    def __init__(self) -> None:
        self.reads, self.mended = 0, False

    def read(self) -> int:
        self.reads += 1
        return round(WATTS * 1e6 * WATCH.now) if self.mended else 7

    def meter(self) -> EnergyMeter:
        return EnergyMeter([Counter("package-0", self.read, 1e-6)], "a counter that is stuck", clock=WATCH)


def test_a_failed_measurement_is_told_again_at_once_and_repeated_after_ten_minutes_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter, now = Stuck(), [100.0]
    use(monkeypatch, counter.meter())
    power = PowerOf(runner := ToyRunner(RandomLogits(24), 24), Steady(), clock=lambda: now[0])
    with pytest.raises(ParlayError, match="the counter of package-0 did not move") as first:
        power()
    counter.mended, reads = True, counter.reads
    for now[0] in (100.0, 100.0 + AGAIN_SECONDS - 1):
        with pytest.raises(ParlayError) as later:
            power()
        assert str(later.value) == str(first.value)
    assert counter.reads == reads, "nothing was measured"
    now[0] = 100.0 + AGAIN_SECONDS + 1
    assert power().watts == pytest.approx(WATTS, rel=0.05)
    runner.check()


def test_where_there_was_no_room_it_is_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, real())
    runner = ToyRunner(RandomLogits(24), 24, capacity=40)
    power = PowerOf(runner, Steady())
    runner.open(0, (1,))
    assert runner.reserve(0, 20)
    with pytest.raises(ParlayError, match="no room"):
        power()
    runner.release(0)
    assert power().watts == pytest.approx(WATTS, rel=0.05)


def test_without_counters_an_unknown_device_is_an_error_that_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, EnergyMeter([], "no counters here"))
    with pytest.raises(UsageError, match="no counters here; and there are no figures for the device cpu"):
        power_of(ToyRunner(RandomLogits(24), 24), Steady())
