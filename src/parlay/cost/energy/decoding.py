"""Measures the power of decoding: fits a line to the power of forwards with few rows and of forwards with many."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from parlay.cost.energy.meter import CounterError, EnergyMeter, TooShort
from parlay.types import ParlayError, PowerModel

ROWS = (1, 32)
"""Row counts of the measured forwards: plain decoding, and a step with drafts."""
_ROUNDS, _SECONDS = 2, 0.4
"""Windows of each row count, and seconds of one window. The row counts take turns. A counter is updated every 20 to
100 ms, so it is updated several times in a window."""
_ATTEMPTS = 5  # attempts to measure a window, each longer than the last, until its counters have moved


class MeasurementFailed(ParlayError):
    """The counters can't tell the power of decoding: they do not move, can't be read, or give impossible values."""


@dataclass(slots=True)
class _Sum:
    """Joules, seconds and forwards of one row count, summed over its windows."""

    joules: float = 0.0
    seconds: float = 0.0
    forwards: int = 0


def measure_power(
    meter: EnergyMeter, forward: Callable[[int], object], *, clock: Callable[[], float] = time.perf_counter
) -> PowerModel:
    """Measure watts, and joules per row, by calls of ``forward``, whose argument is a number of rows.

    A measurement takes some two seconds. The meter must have counters. Raises MeasurementFailed if they do not move,
    can't be read, or show no power.
    """
    try:
        return _measured(meter, forward, clock)
    except CounterError as error:
        raise MeasurementFailed(f"the power of decoding can't be measured: {error}") from error


def _measured(meter: EnergyMeter, forward: Callable[[int], object], clock: Callable[[], float]) -> PowerModel:
    sums = [_Sum() for _ in ROWS]
    for rows in ROWS:
        forward(rows)  # the first forward may build kernels
    for _ in range(_ROUNDS):
        for rows, measured in zip(ROWS, sums, strict=True):
            _add_window(meter, partial(forward, rows), measured, clock)
    watts, row_joules = _fit(sums)
    if not watts > 0:
        raise MeasurementFailed(f"the power of decoding can't be measured: {meter.reason} showed {watts:.3g} W")
    return PowerModel(watts, row_joules, f"measured: {meter.reason}")


def _add_window(meter: EnergyMeter, forward: Callable[[], object], measured: _Sum, clock: Callable[[], float]) -> None:
    window = meter.begin()
    for attempt in range(1, _ATTEMPTS + 1):
        until = clock() + _SECONDS
        while clock() < until:
            forward()
            measured.forwards += 1
        try:
            energy = meter.end(window)
        except TooShort:
            if attempt == _ATTEMPTS:
                raise
        else:
            measured.joules += energy.joules or 0.0
            measured.seconds += energy.seconds
            return


def _fit(sums: Sequence[_Sum]) -> tuple[float, float]:
    """Return the constants of the line power = watts + joules per row * rows per second.

    The line passes through the two measured powers, unless its slope would be negative; then the slope is 0.
    """
    few, many = [each.joules / each.seconds for each in sums]
    rate, faster = [rows * each.forwards / each.seconds for rows, each in zip(ROWS, sums, strict=True)]
    row_joules = max(0.0, (many - few) / (faster - rate)) if faster > rate else 0.0
    return few - row_joules * rate, row_joules
