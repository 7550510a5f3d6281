"""Times how fast memory is read at present: the weights of a packed model, or memory without a model."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from itertools import cycle

from parlay.compiled import structs
from parlay.compiled.library import NotLoaded, load
from parlay.models.compiled.memory import WeightArena
from parlay.system import threads

_WINDOW = 16 << 20  # bytes that are read at a time
_LEAST = 64 << 20  # bytes; weights of fewer may stay in the processor's caches between two forwards
_WITHOUT_MODEL = 192 << 20  # bytes that are read where there is no model: more than caches of one processor hold
_READINGS = 6  # of which the fastest counts: in the first ones a thread may sleep


class WeightReader:
    """Reads some of the packed weights on all threads of a forward, others each time.

    Never those of the LM head: a forward has just read them, so the caches may hold some.
    """

    def __init__(self, core: structs.Core, arena: WeightArena, head: range) -> None:
        """``head`` are the addresses of the LM head's weights."""
        self._core, self._arena = core, arena
        windows = [
            begin for part in arena.parts for begin in part[: 1 - _WINDOW : _WINDOW]
            if begin + _WINDOW <= head.start or begin >= head.stop
        ]  # fmt: skip
        self._windows = cycle(windows if arena.taken >= _LEAST else [])

    def seconds(self) -> float:
        """Seconds that reading all weights once takes at present; 0 if that is not known, as for a small model."""
        at = next(self._windows, 0)
        nanoseconds = self._core.read_through(at, _WINDOW, threads.count()) if at else 0.0
        return nanoseconds * 1e-9 * self._arena.taken / (1 << 20)


class MemoryReader:
    """Reads memory of its own on all threads of a forward, if the compiled library is there."""

    def __init__(self) -> None:
        arena = WeightArena()
        arena.take(_WITHOUT_MODEL)
        for part in arena.parts:
            ctypes.memset(part.start, 1, len(part))  # pages that nobody has written are all the same one
        self._reader: WeightReader | None = None
        with suppress(NotLoaded):
            self._reader = WeightReader(load(), arena, range(0))

    def bandwidth(self) -> float:
        """Bytes per second that all threads together read at present; 0 without the compiled library."""
        readings = [] if self._reader is None else [self._reader.seconds() for _ in range(_READINGS)]
        return max((_WITHOUT_MODEL / seconds for seconds in readings if seconds > 0), default=0.0)
