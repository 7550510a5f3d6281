"""How long parts of a step took, told so that a clock that jumps can't make a figure absurd."""

from __future__ import annotations

import time

_MOST = 3600.0
"""Seconds. No part of a step takes so long; a machine that sleeps, or whose clock is set, seems to."""


def since(began: float) -> float:
    """Seconds since that time of `time.perf_counter`; see `plausible`."""
    return plausible(time.perf_counter() - began)


def plausible(seconds: float) -> float:
    """These seconds; 0 where the clock went back or leapt, so that nothing is known of them."""
    return seconds if 0.0 <= seconds < _MOST else 0.0
