"""Times how fast a packed model's weights are read from memory at present."""

from __future__ import annotations

from itertools import cycle

from parlay.compiled import structs
from parlay.models.compiled.memory import WeightArena
from parlay.system import threads

_WINDOW = 16 << 20  # bytes that are read at a time
_LEAST = 64 << 20  # bytes; weights of fewer may stay in the processor's caches between two forwards


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
