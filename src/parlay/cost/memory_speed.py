"""Follows how fast this machine reads a model's weights from memory, which other guests of the machine change."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

_BETWEEN = 0.5  # seconds between two measurements
_SOON = 0.05  # the same while the latest one contradicts those before it
_LATEST = 3  # how many measurements count; their median is the estimate
_CONTRADICTS = 0.08  # relative difference of a measurement from the estimate
_CHANGED = 0.1  # relative change of the median that changes the estimate; `MeasuredCost` follows smaller ones by itself


class MemorySpeed:
    """How many ``seconds`` reading all weights of a model once takes at present; 0 until that is known.

    ``read`` measures that, within a fraction of a millisecond, and returns 0 if it could not. A forward of few rows
    waits for its weights, so it takes about as long.
    """

    def __init__(self, read: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._read, self._clock = read, clock
        self._latest = deque[float](maxlen=_LATEST)
        self._due = -math.inf

    def begin(self) -> None:
        """Measure as often as an estimate needs."""
        for _ in range(_LATEST):
            self._due = -math.inf
            self.look()

    def look(self) -> bool:
        """Measure if it is time for that. Returns whether the estimate has changed."""
        now = self._clock()
        if now < self._due:
            return False
        seconds = self._read()
        self._due = now + _BETWEEN
        if not 0 < seconds < math.inf:
            return False
        self._latest.append(seconds)
        median = sorted(self._latest)[len(self._latest) // 2]
        if abs(seconds - median) > _CONTRADICTS * median:
            self._due = now + _SOON
        changed = abs(median - self.seconds) > _CHANGED * self.seconds
        self.seconds = median if changed else self.seconds
        return changed
