"""What decoding draws: watts and joules of a row as the hardware has them, or a reason why there are none."""

from __future__ import annotations

import random

import pytest

from parlay.cost.devices import DEVICES, power
from parlay.cost.energy import Counter, CounterError, EnergyMeter, MeasurementFailed, measure_power
from parlay.types import ParlayError

WATTS, ROW_JOULES = 80.0, 0.05


class Hardware:
    """It draws so many watts, and each row uses so many joules; its counter of millijoules moves now and then."""

    def __init__(self, row_joules: float, *, period: float = 0.0, noise: float = 0.0) -> None:
        self.now = self._joules = self._shown = self._shown_at = 0.0
        self._row_joules, self._period, self._noise = row_joules, period, noise
        self._chance = random.Random(0)

    def forward(self, rows: int) -> None:
        seconds = 0.004 * (1 + 0.03 * (rows - 1))
        self.now += seconds
        noise = self._chance.gauss(1.0, self._noise)
        self._joules += (WATTS * seconds + self._row_joules * rows) * noise

    def counts(self) -> int:
        if self.now - self._shown_at >= self._period:
            self._shown, self._shown_at = self._joules, self.now
        return round(1000 * self._shown)

    def meter(self) -> EnergyMeter:
        return EnergyMeter([Counter("GPU 0", self.counts, 1e-3)], "a fake counter", clock=lambda: self.now)


@pytest.mark.parametrize("row_joules", [ROW_JOULES, 0.0])
def test_watts_and_joules_of_a_row_are_found(row_joules: float) -> None:
    hardware = Hardware(row_joules, noise=0.02)
    found = measure_power(hardware.meter(), hardware.forward, clock=lambda: hardware.now)
    assert found.watts == pytest.approx(WATTS, rel=0.03)
    assert found.row_joules == pytest.approx(row_joules, abs=0.002)
    assert str(found).endswith("measured: a fake counter")
    assert hardware.now < 3, "seconds that nobody is served in"


def test_a_counter_that_moves_seldom_is_waited_for() -> None:
    hardware = Hardware(ROW_JOULES, period=1.0)
    found = measure_power(hardware.meter(), hardware.forward, clock=lambda: hardware.now)
    assert found.watts == pytest.approx(WATTS, rel=0.5), "windows of few updates"


def test_a_counter_that_never_moves_is_an_error_after_some_seconds() -> None:
    hardware = Hardware(ROW_JOULES, period=1e9)
    with pytest.raises(ParlayError, match="can't be measured: the counter of GPU 0 did not move"):
        measure_power(hardware.meter(), hardware.forward, clock=lambda: hardware.now)
    assert hardware.now < 6


def test_a_counter_that_can_not_be_read_any_more_is_one_line() -> None:
    hardware, left = Hardware(ROW_JOULES), [3]

    def read() -> int:
        left[0] -= 1
        if left[0] < 0:
            raise CounterError("the counter of GPU 0 can't be read any more: it fell off the bus")
        return hardware.counts()

    meter = EnergyMeter([Counter("GPU 0", read, 1e-3)], "a fake counter", clock=lambda: hardware.now)
    with pytest.raises(MeasurementFailed, match="can't be measured: the counter of GPU 0 can't be read any more"):
        measure_power(meter, hardware.forward, clock=lambda: hardware.now)


def test_power_of_a_known_board_is_modelled_and_says_so() -> None:
    row_seconds = 1e-5
    found = power("NVIDIA H100 80GB HBM3", row_seconds)
    assert found is not None
    assert found.source.startswith("modelled from the 700 W")
    assert found.mean(1, 1.0) < found.mean(1, row_seconds) == pytest.approx(700.0), "all of it where arithmetic limits"
    assert power("cpu", row_seconds) is None
    assert power("NVIDIA L40", row_seconds) is None, "no L4"


def test_every_board_is_found_by_its_own_name_alone() -> None:
    for device in DEVICES.values():
        for name in device.called:
            found = power(f"NVIDIA {name}", 0.0)
            assert found is not None
            assert f"{device.watts:g} W of the board {name}" in found.source
