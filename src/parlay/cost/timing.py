"""Times a few forwards when a model is opened, so that its first requests know what steps cost."""

from __future__ import annotations

import logging
import math
import time

from parlay.cost.measured import MeasuredCost
from parlay.types import NO_COST, KeptCost, OutOfRoom, Runner, Segment

_CALIBRATED = (1, 16, 4, 32, 2, 8, 17, 9, 33, 12, 13, 64, 65)  # the most informative first, in case time runs out
_PASSES, _ENOUGH = 3, 0.1  # passes over them, and seconds, after which no more is timed
_SMALL, _AGAIN = (1, 2, 4, 8), 0.1  # those that drafts pay or do not pay by are timed again, for so many seconds
_SCRATCH = -1  # the sequence that calibration runs in; the engine's names are not negative
_log = logging.getLogger(__name__)


def calibrate(runner: Runner, seconds: float = 0.3, kept: KeptCost = NO_COST) -> MeasuredCost:
    """Time a few forwards of 1 to 65 rows in a scratch sequence, for so many seconds at most.

    A machine's other work delays some of them, so the prices of rows beside each other are uncertain. Where an earlier
    process has ``kept`` what it learned in its steps, that is taken, and only the speed of now is measured, in half
    the time. A runner without room for 65 tokens is not timed: the cost then starts from a guess.
    """
    deadline = time.perf_counter() + seconds
    runner.open(_SCRATCH, (0,))
    try:
        if not runner.reserve(_SCRATCH, max(_CALIBRATED)):
            return MeasuredCost()
        return _restored(runner, kept) if kept else MeasuredCost(_time_rows(runner, deadline))
    except OutOfRoom:
        return MeasuredCost()
    finally:
        runner.release(_SCRATCH)


def _restored(runner: Runner, kept: KeptCost) -> MeasuredCost:
    """What was kept, if that can be used."""
    timed = _time_small(runner)
    try:
        return MeasuredCost.restored(kept, timed)
    except ValueError as error:
        _log.warning("what was kept of the cost of steps can't be used (%s): it is measured anew", error)
        return MeasuredCost(_time_rows(runner, time.perf_counter() + _AGAIN))


def _time_small(runner: Runner) -> list[tuple[int, float]]:
    """One row, then those that drafts pay or do not pay by, in turn."""
    _time_forward(runner, 1)  # the first one ever may build kernels
    timed = [(1, _time_forward(runner, 1))]
    again, latest = time.perf_counter() + _AGAIN, len(_SMALL) * timed[0][1]
    while time.perf_counter() + latest <= again:
        timed += (turn := [(rows, _time_forward(runner, rows)) for rows in _SMALL])
        latest = sum([seconds for _, seconds in turn])
    return timed


def _time_rows(runner: Runner, deadline: float) -> dict[int, float]:
    """The shortest time for each row count. Every pass times all of them, so that a slow moment affects all alike.

    One pass may be all that there is time for. A delay in it would make a small draft seem expensive for good, because
    a policy does not verify what does not seem to pay; so few rows are timed more often.
    """
    best = _time_all(runner, deadline)
    again = time.perf_counter() + _AGAIN
    while time.perf_counter() + sum(best.get(rows, math.inf) for rows in _SMALL) <= again:
        for rows in _SMALL:
            best[rows] = min(best[rows], _time_forward(runner, rows))
    return best


def _time_all(runner: Runner, deadline: float) -> dict[int, float]:
    """In passes over all row counts, until the deadline."""
    best: dict[int, float] = {}
    enough = time.perf_counter() + _ENOUGH
    _time_forward(runner, 1)  # the first one ever may build kernels
    passes = 0
    while passes < _PASSES or time.perf_counter() < enough:
        for rows in _CALIBRATED:
            guess = best.get(rows) or max(best.values(), default=0.0)
            if best and time.perf_counter() + guess > deadline:
                return best
            best[rows] = min(best.get(rows, float("inf")), _time_forward(runner, rows))
        passes += 1
    return best


def _time_forward(runner: Runner, rows: int) -> float:
    start = time.perf_counter()
    tokens = tuple(row % runner.spec.vocab_size for row in range(rows))
    out = runner.forward([Segment(_SCRATCH, tokens)])
    out.logits_RV[-1, 0].item()  # waits until an asynchronous device is done
    return time.perf_counter() - start
