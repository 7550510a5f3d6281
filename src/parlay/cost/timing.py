"""Times forwards of a runner. A few are timed when a model is loaded, so that costs are known at its first request."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from parlay.cost.measured import MeasuredCost
from parlay.cost.memory_speed import MemorySpeed
from parlay.types import NO_COST, KeptCost, OutOfRoom, Runner, Segment, trees

_ROW_COUNTS = (1, 16, 4, 32, 2, 8, 17, 9, 33, 12, 13, 64, 65)  # rows, most informative first, in case time runs out
_PASSES, _ENOUGH = 3, 0.1  # no further pass begins after this number of passes and this number of seconds
_SMALL_ROWS, _AGAIN = (1, 2, 4, 8), 0.1  # row counts timed again, which decide whether drafts pay; seconds for that
_SCRATCH = -1  # number of the sequence that calibration uses; the engine's sequences have no negative numbers
_CHUNK = 256  # rows of a prefill chunk
_STREAMED_SECONDS = 3.0
"""Seconds for calibration of a runner that reads layers from disk, which takes most of the time of a forward."""
_log = logging.getLogger(__name__)


def some_tokens(runner: Runner, count: int, first_id: int = 0) -> tuple[int, ...]:
    """Make up ``count`` token ids of the runner's vocabulary.

    The first is the id 0, or the decoder's start token in an encoder-decoder. The others count up from
    ``first_id`` + 1.
    """
    spec = runner.spec
    first = 0 if spec.encoder is None else spec.encoder.start
    return tuple([(first_id + place) % spec.vocab_size if place else first for place in range(count)])


def chain_of(runner: Runner, sequence: int, rows: int) -> Segment:
    """Make a segment of ``rows`` rows: a root row and a chain of drafted tokens below it."""
    root, *draft = some_tokens(runner, rows)
    return Segment(sequence, (root,), trees.chain_tree(draft))


def time_forward(runner: Runner, segments: Sequence[Segment], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one forward. The caller keeps none of its rows."""
    began = clock()
    out = runner.forward(segments)
    out.logits_RV[-1, 0].item()  # waits until an asynchronous device is done
    return clock() - began


@contextmanager
def with_context(runner: Runner, sequence: int, context: int, rows: int) -> Iterator[bool]:
    """Open a sequence with ``context`` cached tokens and room for ``rows`` more. Yields False if there is no room.

    The text depends on the number ``sequence``, so that sequences share no cached keys.
    """
    longest = context + rows
    runner.open(sequence, (0,))  # a prompt of one token matches nothing in the prefix cache
    try:
        fits = longest <= runner.spec.max_context and runner.reserve(sequence, longest)
        for start in range(0, context if fits else 0, _CHUNK):
            tokens = some_tokens(runner, min(_CHUNK, context - start), start + abs(sequence))
            runner.forward([Segment(sequence, tokens, logits_from=len(tokens))])
            runner.keep(sequence, ())
        yield fits
    finally:
        runner.release(sequence)


def calibrate(
    runner: Runner,
    seconds: float = 0.3,
    kept: KeptCost = NO_COST,
    *,
    memory: MemorySpeed | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredCost:
    """Time forwards of 1 to 65 rows in a scratch sequence, for at most ``seconds``.

    Other work of the machine delays some forwards, so these times give the relative costs of row counts imprecisely.
    If an earlier process has ``kept`` its estimates, they are used instead, and only the present speed is measured. A
    runner without room for 65 tokens is not timed; its cost starts from a guess. A runner that reads layers from disk
    gets more time, and at least two row counts are timed, so that the cost of further rows is no guess. ``memory``
    follows the speed of memory from now on.
    """
    seconds = _STREAMED_SECONDS if runner.spec.streamed_bytes else seconds
    timer, deadline = _Timer(runner, clock), clock() + seconds
    runner.open(_SCRATCH, (0,))
    try:
        encoder, most = runner.spec.encoder, max(_ROW_COUNTS)
        longest = runner.spec.max_context if encoder is None else encoder.max_target
        if longest < most or not runner.reserve(_SCRATCH, most):
            return MeasuredCost()
        return _measured(timer, kept, deadline, memory)
    except OutOfRoom:
        return MeasuredCost()
    finally:
        runner.release(_SCRATCH)


def _measured(timer: _Timer, kept: KeptCost, deadline: float, memory: MemorySpeed | None) -> MeasuredCost:
    """Restore the kept estimates at the machine's present speed.

    Measure new ones if there are none, or if they can't be used.
    """
    if not kept:
        return MeasuredCost(timer.shortest(deadline), _begun(memory))
    timed = timer.small()
    try:
        return MeasuredCost.restored(kept, timed, _begun(memory))
    except ValueError as error:
        _log.warning("the saved costs of steps can't be used (%s), so they are measured again", error)
        return MeasuredCost(timer.shortest(timer.clock() + _AGAIN), memory)


def _begun(memory: MemorySpeed | None) -> MemorySpeed | None:
    """Measure memory now, since the threads of the forwards that were timed are still awake."""
    if memory is not None:
        memory.begin()
    return memory


@dataclass(frozen=True, slots=True)
class _Timer:
    """Times forwards of the scratch sequence."""

    runner: Runner
    clock: Callable[[], float]

    @property
    def min_row_counts(self) -> int:
        """Number of row counts that are timed even after the deadline."""
        return 2 if self.runner.spec.streamed_bytes else 1

    def small(self) -> list[tuple[int, float]]:
        """Time a forward of one row, then the row counts `_SMALL_ROWS` in turn for `_AGAIN` seconds."""
        self._forward(1)  # the first forward may build kernels
        timed = [(1, self._forward(1))]
        again, latest = self.clock() + _AGAIN, len(_SMALL_ROWS) * timed[0][1]
        while self.clock() + latest <= again:
            timed += [(rows, self._forward(rows)) for rows in _SMALL_ROWS]
            latest = sum([seconds for _, seconds in timed[-len(_SMALL_ROWS) :]])
        return timed

    def shortest(self, deadline: float) -> dict[int, float]:
        """Return the shortest time for each row count.

        Every pass times all row counts, so a slow moment affects all of them alike. There may be time for only one
        pass. If a forward in it is delayed, a small draft may seem too expensive. Then a policy would never verify such
        drafts, and nothing would correct the error. So the row counts `_SMALL_ROWS` are timed more often.
        """
        best = self._all(deadline)
        again = self.clock() + _AGAIN
        while self.clock() + sum(best.get(rows, math.inf) for rows in _SMALL_ROWS) <= again:
            for rows in _SMALL_ROWS:
                best[rows] = min(best[rows], self._forward(rows))
        return best

    def _all(self, deadline: float) -> dict[int, float]:
        """Time all row counts in passes, until the deadline."""
        best: dict[int, float] = {}
        enough = self.clock() + _ENOUGH
        self._forward(1)  # the first one ever may build kernels
        passes = 0
        while passes < _PASSES or self.clock() < enough:
            for rows in _ROW_COUNTS:
                guess = best.get(rows) or _guess(best, rows)
                if len(best) >= self.min_row_counts and self.clock() + guess > deadline:
                    return best
                best[rows] = min(best.get(rows, math.inf), self._forward(rows))
            passes += 1
        return best

    def _forward(self, rows: int) -> float:
        return time_forward(self.runner, [Segment(_SCRATCH, some_tokens(self.runner, rows))], self.clock)


def _guess(timed: Mapping[int, float], rows: int) -> float:
    """Guess the seconds of a forward: at most those of the dearest so far, or in proportion to one of fewer rows."""
    dearest = max(timed.values(), default=0.0)
    return min([dearest, *[seconds * rows / fewer for fewer, seconds in timed.items() if fewer < rows]])
