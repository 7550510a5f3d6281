"""Training time: wall time without the gaps in which the process was stopped."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

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
