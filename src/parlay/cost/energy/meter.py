"""The meter: how far hardware counters advance between two readings, in joules, or why they can't be read.

Every reading adds the advance since the last one, modulo the counter's range. So a counter that wraps around is handled
as long as it is read at least once per round (tens of minutes for a processor package's counter). A window is a pair of
readings: windows may nest and overlap, and windows within another add up to no more than that one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from parlay.types import Metrics, ParlayError


class CounterError(ParlayError):
    """A counter can't be read, or its value is of no use."""


class TooShort(CounterError):
    """A counter did not move within a window: it is updated less often than that."""


@dataclass(frozen=True, slots=True)
class Counter:
    """An energy counter of the hardware. ``name`` says whose energy it counts; ``unit`` is joules per count.

    ``read`` returns the count, or raises CounterError. After ``most`` the count starts again at 0; None: it never
    wraps.
    """

    name: str
    read: Callable[[], int]
    unit: float
    most: int | None = None

    def advance(self, before: int, now: int) -> int:
        """Return how far the counter moved between two readings less than one round apart."""
        return now - before if self.most is None else (now - before) % (self.most + 1)


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy that was used in a window. ``joules`` include idle power; ``includes`` names the counters.

    With ``joules`` None there are no counters, and ``reason`` says why.
    """

    joules: float | None
    seconds: float
    includes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Window:
    """The beginning of a window: the time, and the sums of all counters."""

    began: float
    counts: tuple[int, ...]


class EnergyMeter:
    """Measures the energy of windows by ``counters``; without counters a window has no joules, only ``reason``.

    ``reason`` says in one line what is counted and why the rest is not. ``settle`` is called before each reading and
    waits for asynchronous devices.
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
        """Names of the counters whose energy is included."""
        return tuple(counter.name for counter in self._counters)

    def begin(self) -> Window:
        return Window(*self._read())

    def end(self, window: Window) -> Energy:
        """Return the energy used since the window began. The same window may be ended again later.

        Raises TooShort when a counter has not moved: 0 joules would be wrong.
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
    """Return joules per emitted token. Rejected drafts use joules but are not counted as tokens.

    None where there are no joules. Raises ValueError when no token was emitted.
    """
    tokens = sum(metrics.completion_tokens for metrics in samples)
    if tokens == 0:
        raise ValueError("no tokens were emitted: joules per token are not defined")
    return None if energy.joules is None else energy.joules / tokens
