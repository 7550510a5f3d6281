"""Time of a run: the clock that survives restarts, and the schedules of learning rate and row length."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

WARM_UP = 0.03
DECAY_FROM = 0.45
LENGTHS = ((0.8, 512), (1.0, 2048))


def learning_rate(share: float) -> float:
    """Factor on the peak rate: linear warm-up, constant, linear decay to zero at share 1."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.02)
    return min(1.0, max(0.0, (1 - share) / (1 - DECAY_FROM)))


def row_length(share: float, longest: int) -> int:
    """Tokens per row, at most ``longest``."""
    return next(min(length, longest) for until, length in LENGTHS if share <= until or until == 1.0)


GAP = 4.0


class TrainingClock:
    """Seconds of training. A lap counts for at most ``GAP`` times the median lap; `uncapped` counts in full."""

    def __init__(self, elapsed: float = 0.0) -> None:
        self.elapsed = elapsed
        self._laps: deque[float] = deque(maxlen=31)
        self._last = time.monotonic()

    def lap(self) -> float:
        """Ends a lap; returns the seconds counted for it."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if len(self._laps) >= 5:
            seconds = min(seconds, GAP * statistics.median(self._laps))
        self._laps.append(seconds)
        self.elapsed += seconds
        return seconds

    @contextmanager
    def uncapped(self) -> Iterator[None]:
        """Work that is known to be long (compiling, checking, saving) counts in full and is no lap."""
        started = time.monotonic()
        yield
        self._last = time.monotonic()
        self.elapsed += self._last - started
