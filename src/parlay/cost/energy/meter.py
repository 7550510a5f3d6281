"""Measures energy in joules by how far hardware counters advance between two readings.

Every reading adds the advance since the last one, modulo the counter's range. So a counter may wrap around, if it is
read at least once per wrap (tens of minutes for a processor package's counter). A window is a pair of readings. Windows
may nest and overlap. Disjoint windows inside a longer one add up to no more than the longer one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from parlay.types import Metrics, ParlayError


class CounterError(ParlayError):
    """A counter can't be read, or its value can't be used."""


class TooShort(CounterError):
    """A counter did not move within a window: the window is shorter than the time between the counter's updates."""


@dataclass(frozen=True, slots=True)
class Counter:
    """An energy counter of the hardware. ``name`` says whose energy it counts; ``unit`` is joules per count.

    ``read`` returns the count, or raises CounterError. ``most`` is the highest count, after which the counter starts
    again at 0; None means that it never wraps.
    """

    name: str
    read: Callable[[], int]
    unit: float
    most: int | None = None

    def advance(self, before: int, now: int) -> int:
        """Return how far the counter moved between two readings, between which it wrapped at most once."""
        return now - before if self.most is None else (now - before) % (self.most + 1)


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy that was used in a window. ``joules`` include idle power; ``includes`` names the counters.

    Without counters ``joules`` is None, and ``reason`` says why there are none.
    """

    joules: float | None
    seconds: float
    includes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Window:
    """The beginning of a window: the time in seconds, and the advance of each counter since the meter was made."""

    began: float
    counts: tuple[int, ...]


class EnergyMeter:
    """Measures the energy of windows by ``counters``. Without counters it measures only seconds.

    ``reason`` says in one line what is counted, and why anything is not. The meter calls ``settle`` before each reading
    to wait for asynchronous devices.
    """

    def __init__(
        self,
        counters: Sequence[Counter],
        reason: str,
        *,
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.reason = reason
        self._counters = tuple(counters)
        self._settle, self._clock = settle, clock
        self._last = [counter.read() for counter in self._counters]
        self._sums = [0] * len(self._counters)

    @property
    def includes(self) -> tuple[str, ...]:
        """Names of the counters that are added up."""
        return tuple(counter.name for counter in self._counters)

    def begin(self) -> Window:
        """Read the counters at the beginning of a window."""
        return Window(*self._read())

    def end(self, window: Window) -> Energy:
        """Return the energy used since the window began. The same window may be ended again later.

        Raises TooShort if a counter has not moved, because 0 joules would be wrong, and CounterError if a counter can't
        be read.
        """
        now, counts = self._read()
        seconds = now - window.began
        if not self._counters:
            return Energy(None, seconds, (), self.reason)
        joules = 0.0
        for counter, before, after in zip(self._counters, window.counts, counts, strict=True):
            if after == before:
                raise TooShort(
                    f"the counter of {counter.name} did not move in {seconds:.3f} s: repeat the work until it lasts "
                    "some seconds"
                )
            joules += (after - before) * counter.unit
        return Energy(joules, seconds, self.includes, self.reason)

    def _read(self) -> tuple[float, tuple[int, ...]]:
        self._settle()
        for number, counter in enumerate(self._counters):
            now = counter.read()
            self._sums[number] += counter.advance(self._last[number], now)
            self._last[number] = now
        return self._clock(), tuple(self._sums)


def joules_per_token(energy: Energy, samples: Iterable[Metrics]) -> float | None:
    """Return joules per emitted token; None if the energy has no joules.

    Rejected drafts use energy but are not counted as tokens. Raises ValueError if no token was emitted.
    """
    tokens = sum(metrics.completion_tokens for metrics in samples)
    if tokens == 0:
        raise ValueError("no tokens were emitted: joules per token are not defined")
    return None if energy.joules is None else energy.joules / tokens
