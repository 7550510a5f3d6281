"""Measures the power of decoding: energy of forwards with few rows and with many, and a line fitted to both."""

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
"""Windows of each row count, taken in turns; and seconds of one window: several updates of a counter (20 to 100 ms)."""
_MOST = 5  # times that a window is made longer, until its counters have moved


class MeasurementFailed(ParlayError):
    """The counters can't tell the power of decoding: they stand still, can't be read, or give impossible values."""


@dataclass(slots=True)
class _Sum:
    """Sums over the windows of one row count."""

    joules: float = 0.0
    seconds: float = 0.0
    forwards: int = 0


def measure_power(
    meter: EnergyMeter, forward: Callable[[int], object], *, clock: Callable[[], float] = time.perf_counter
) -> PowerModel:
    """Fit watts and joules per row to runs of ``forward``, which takes a number of rows. Takes two seconds.

    The meter must have counters. Raises MeasurementFailed if they do not move, can't be read, or show no power.
    """
    try:
        return _measured(meter, forward, clock)
    except CounterError as error:
        raise MeasurementFailed(f"what decoding draws can't be measured: {error}") from error


def _measured(meter: EnergyMeter, forward: Callable[[int], object], clock: Callable[[], float]) -> PowerModel:
    sums = [_Sum() for _ in ROWS]
    for rows in ROWS:
        forward(rows)  # the first forward may build kernels
    for _ in range(_ROUNDS):
        for rows, measured in zip(ROWS, sums, strict=True):
            _add_window(meter, partial(forward, rows), measured, clock)
    watts, row_joules = _fit(sums)
    if not watts > 0:
        raise MeasurementFailed(f"what decoding draws can't be measured: {meter.reason} showed {watts:.3g} W")
    return PowerModel(watts, row_joules, f"measured: {meter.reason}")


def _add_window(meter: EnergyMeter, forward: Callable[[], object], measured: _Sum, clock: Callable[[], float]) -> None:
    window = meter.begin()
    for attempt in range(1, _MOST + 1):
        until = clock() + _SECONDS
        while clock() < until:
            forward()
            measured.forwards += 1
        try:
            energy = meter.end(window)
        except TooShort:
            if attempt == _MOST:
                raise
        else:
            measured.joules += energy.joules or 0.0
            measured.seconds += energy.seconds
            return


def _fit(sums: Sequence[_Sum]) -> tuple[float, float]:
    """Return watts, and joules per row: the line through the two measured powers by rows per second.

    Its slope is at least 0.
    """
    few, many = [each.joules / each.seconds for each in sums]
    rate, faster = [rows * each.forwards / each.seconds for rows, each in zip(ROWS, sums, strict=True)]
    row_joules = max(0.0, (many - few) / (faster - rate)) if faster > rate else 0.0
    return few - row_joules * rate, row_joules
