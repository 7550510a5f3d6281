"""Clocks of an engine, and how long parts of a step took, so that a clock that jumps can't make a figure absurd."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""The time in seconds from any fixed point on, such as `time.perf_counter`."""

_MOST = 3600.0
"""Seconds. No part of a step takes so long; a machine that sleeps, or whose clock is set, seems to."""


def since(began: float, clock: Clock) -> float:
    """Seconds since ``began`` by the clock; see `plausible`."""
    return plausible(clock() - began)


def plausible(seconds: float) -> float:
    """Pass seconds on; 0 where the clock went back or leapt, so that nothing is known of them."""
    return seconds if 0.0 <= seconds < _MOST else 0.0
