"""Seconds of a server's steps: by the roofline of a machine, or by steps that were measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from parlay.cost.roofline import Machine, ModelShape, StepShape, step_operators, uneven
from parlay.types import Cost

StepCost = Callable[[int, float, float, float, float], float]
"""Seconds of a step: forward and the engine's work around it, but nothing that is done for drafts.

Its arguments are those of a `StepShape`: sequences, rows, rows through the LM head, keys read, pairs of row and key.
Rows are means, so they need not be whole.
"""


class RooflineSteps:
    """A `StepCost` by a machine's roofline, quick enough for millions of steps.

    Products with weights depend on rows alone, so they are computed once for each number of rows.
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
        """Seconds of a step without attention, and what the engine takes once."""
        found = self._linear.get((rows, head_rows))
        if found is None:
            nothing = StepShape(0, rows, head_rows, -rows, 0)  # no keys are read or written
            found = self._linear[rows, head_rows] = self._machine.step(self._shape, nothing) + self._engine.step
        return found


class LearnedSteps:
    """A `StepCost` by a cost that an engine learned on this machine."""

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
    """One step that was measured: its rows, the keys that it read, and its seconds."""

    rows: int
    keys: float
    seconds: float


class MeasuredSteps:
    """A `StepCost` by the mean of measured steps: straight between numbers of rows, and so much more for each key.

    Raises ValueError if there are fewer than two numbers of rows.
    """

    def __init__(self, steps: Iterable[TimedStep]) -> None:
        groups: dict[int, list[TimedStep]] = {}
        for step in steps:
            groups.setdefault(_group(step.rows), []).append(step)
        if len(groups) < 2:
            raise ValueError(f"steps of {len(groups)} numbers of rows were measured: at least 2 are needed")
        self._key = _per_key(list(groups.values()))
        self._points = sorted(self._point(group) for group in groups.values())

    def __call__(self, sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
        points = self._points
        high = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
        (fewer, less), (more, most) = points[high - 1], points[high]
        return max(1e-6, less + (most - less) * (rows - fewer) / (more - fewer) + self._key * keys)

    def _point(self, group: Sequence[TimedStep]) -> tuple[float, float]:
        """Mean rows, and mean seconds but for those of the keys."""
        seconds = sum(step.seconds - self._key * step.keys for step in group)
        return sum(step.rows for step in group) / len(group), seconds / len(group)


def _group(rows: int) -> int:
    """Steps are put together by rows: each number up to 32, then in ranges that grow by an eighth."""
    if rows <= 32:
        return rows
    width = 1 << (rows.bit_length() - 4)
    return rows // width * width


def _per_key(groups: Sequence[Sequence[TimedStep]]) -> float:
    """Seconds of a further key by least squares within groups of like rows; not below 0."""
    over = under = 0.0
    for group in groups:
        keys = sum(step.keys for step in group) / len(group)
        seconds = sum(step.seconds for step in group) / len(group)
        over += sum((step.keys - keys) * (step.seconds - seconds) for step in group)
        under += sum((step.keys - keys) ** 2 for step in group)
    return max(0.0, over / under) if under else 0.0
