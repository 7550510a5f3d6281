"""Computes the seconds of a server's steps, from a machine's roofline or from measured steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parlay.cost.roofline import Machine, ModelShape, StepShape, step_operators, uneven
from parlay.types import Cost

StepCost = Callable[[int, float, float, float, float], float]
"""Seconds of a step: the forward and the engine's work around it, without drafting.

The arguments are the fields of a `StepShape`: sequences, rows, rows through the LM head, keys read, and pairs of a row
and a key. Numbers of rows are means, so they may be fractions.
"""


def forward_seconds(cost: StepCost, rows: int, context: int) -> float:
    """The seconds of a forward of ``rows`` rows behind ``context`` tokens, as the engine's own estimates have them."""
    return cost(1, rows, 1, context, rows * context)


class RooflineSteps:
    """A `StepCost` from a machine's roofline, fast enough for millions of steps.

    The time of products with weights depends only on the numbers of rows, so it is computed once for each of them.
    """

    def __init__(self, machine: Machine, shape: ModelShape) -> None:
        self._machine, self._shape, self._engine = machine, shape, machine.engine
        self._linear: dict[tuple[int, int], float] = {}
        units = {each.name: each for each in step_operators(shape, StepShape(1, 1, 1, 0, 1))}
        attention, softmax = units["attention"], units["softmax"]
        self._key = shape.attended_bytes / machine.keys_bandwidth(shape)
        self._pair = attention.flops / machine.attention_rate
        self._scores = softmax.bytes / machine.vector_bandwidth
        self._path = shape.num_layers * machine.attend_seconds

    def __call__(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
        whole, head = int(rows), int(head_rows)
        fixed = self._of_rows(whole, head)
        if whole != rows:
            fixed += (rows - whole) * (self._of_rows(whole + 1, head + 1) - fixed)
        return (
            fixed
            + sequences * (self._path + self._engine.sequence)
            + self._uneven(sequences) * (self._key * (keys + rows) + self._pair * pairs)
            + self._scores * pairs
        )

    def _uneven(self, sequences: int) -> float:
        return uneven(self._shape, sequences, self._machine.threads)

    def _of_rows(self, rows: int, head_rows: int) -> float:
        """Return the seconds of a step without attention, plus the engine's fixed time per step."""
        found = self._linear.get((rows, head_rows))
        if found is None:
            nothing = StepShape(0, rows, head_rows, -rows, 0)  # no keys are read or written
            found = self._linear[rows, head_rows] = self._machine.step(self._shape, nothing) + self._engine.step
        return found


class LearnedSteps:
    """A `StepCost` from the estimates that an engine learned on this machine.

    Contexts are rounded up to a power of two, because the engine learns by buckets of context lengths.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._known: dict[tuple[int, int], float] = {}

    def __call__(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
        rows, context = round(rows), max(256, 1 << (round(keys / max(1, sequences)) - 1).bit_length())
        found = self._known.get((rows, context))
        if found is None:
            found = self._known[rows, context] = self._cost.forward(rows, context)
        return found


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One measured step: its rows, the keys that it read, its seconds, and its pairs of a row and a key.

    If each sequence has one row, there are as many pairs as keys.
    """

    rows: int
    keys: float
    seconds: float
    pairs: float = 0.0

    @property
    def causes(self) -> tuple[float, float, float]:
        """The three numbers that make a step of its group longer: rows, keys, and pairs beyond one for each key.

        Up to `_MAX_SINGLE_ROWS` rows, all steps of a group have the same number of rows, so that number is left out: 0.
        """
        rows = float(self.rows) if self.rows > _MAX_SINGLE_ROWS else 0.0
        return rows, self.keys, max(0.0, self.pairs - self.keys)


class MeasuredSteps:
    """A `StepCost` from means of measured steps.

    It is linear between the measured numbers of rows. Each key adds the same time, and so does each pair of a row and a
    key beyond one for each key, because a chunk of a prompt takes longer the more text lies before it. Raises
    ValueError unless at least two numbers of rows were measured.
    """

    def __init__(self, steps: Iterable[TimedStep]) -> None:
        groups: dict[int, list[TimedStep]] = {}
        for step in steps:
            groups.setdefault(_group(step.rows), []).append(step)
        if len(groups) < 2:
            raise ValueError(f"steps with {len(groups)} different numbers of rows were measured: at least 2 are needed")
        _, self._key, self._pair = map(float, _slopes(list(groups.values())))
        self._points = sorted(self._point(group) for group in groups.values())

    def __call__(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
        points = self._points
        high = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
        (fewer, less), (more, most) = points[high - 1], points[high]
        straight = less + (most - less) * (rows - fewer) / (more - fewer)
        return max(1e-6, straight + self._key * keys + self._pair * max(0.0, pairs - keys))

    def _point(self, group: Sequence[TimedStep]) -> tuple[float, float]:
        """Return a group's mean rows, and its mean seconds without the time for keys and pairs."""
        seconds = 0.0
        for step in group:
            _, keys, pairs = step.causes
            seconds += step.seconds - self._key * keys - self._pair * pairs
        return sum(step.rows for step in group) / len(group), seconds / len(group)


_MAX_SINGLE_ROWS = 32
"""Up to this number of rows, each number has a group of steps. Above it a group is a range of about an eighth."""


def _group(rows: int) -> int:
    if rows <= _MAX_SINGLE_ROWS:
        return rows
    width = 1 << (rows.bit_length() - 4)
    return rows // width * width


def _slopes(groups: Sequence[Sequence[TimedStep]]) -> NDArray[np.float64]:
    """Return the seconds that each of a step's `causes` adds, by least squares within groups of similar rows.

    Causes whose seconds would be negative are left out one after another and get 0. Within a group, seconds are divided
    by their mean, so that long steps do not outweigh short ones.
    """
    causes, seconds = [], []
    for group in groups:
        own_SC, took_S = np.array([step.causes for step in group]), np.array([step.seconds for step in group])
        causes.append((own_SC - own_SC.mean(axis=0)) / took_S.mean())
        seconds.append(took_S / took_S.mean() - 1)
    causes_SC, seconds_S = np.concatenate(causes), np.concatenate(seconds)
    slopes_C, kept = np.zeros(causes_SC.shape[1]), list(range(causes_SC.shape[1]))
    while kept:
        found = np.linalg.lstsq(causes_SC[:, kept], seconds_S, rcond=None)[0]
        if min(found) >= 0:
            slopes_C[kept] = found
            break
        kept = [cause for cause, slope in zip(kept, found, strict=True) if slope > 0]
    return slopes_C
