"""Curves of accuracy against tokens per forward, and the numbers that sum them up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from parlay.bench.quality.run import PART, selector_of
from parlay.bench.records import Row
from parlay.certificates.quality import Kept
from parlay.types import Exactness, tokens_per_step

KEPT = 0.99
"""Of the best accuracy measured on a task, so much a setting has to reach to be kept."""
_STEEP = 3.0
_MOST_LOST = 0.05


class Point(NamedTuple):
    """One setting on one task, or the mean over tasks. ``accuracy`` is a share of right answers."""

    tokens_per_forward: float
    accuracy: float
    strategy: str = ""


Curve = Sequence[Point]
"""Settings of one selector by tokens per forward, the fewest first."""


def points(rows: Iterable[Row]) -> dict[tuple[str, str], list[Point]]:
    """Points by model and task, in the order of the rows."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for row in rows:
        if row.cell.part == PART and row.requests:
            speed = tokens_per_step(row.tokens, row.steps)
            point = Point(speed, row.values["right"] / row.requests, row.cell.strategy)
            found[row.cell.model, row.cell.workload].append(point)
    return dict(found)


def by_selector(own: Iterable[Point]) -> dict[str, Curve]:
    """One task's points as a curve for each selector, or for each strategy that has none."""
    found: dict[str, list[Point]] = defaultdict(list)
    for point in own:
        found[selector_of(point.strategy)].append(point)
    return {name: sorted(each) for name, each in found.items()}


def frontier(curve: Curve) -> Curve:
    """The settings that no other of the curve beats in both."""
    least, found = -1.0, []
    for point in sorted(curve, reverse=True):
        if point.accuracy > least:
            least = point.accuracy
            found.append(point)
    return found[::-1]


def over_tasks(each: Sequence[Iterable[Point]]) -> list[Point]:
    """The means over tasks of each setting that was measured on all of them."""
    tables = [{point.strategy: point for point in own} for own in each]
    common = [name for name in tables[0] if all(name in table for table in tables)]
    return [
        Point(
            sum(table[name].tokens_per_forward for table in tables) / len(tables),
            sum(table[name].accuracy for table in tables) / len(tables),
            name,
        )
        for name in common
    ]


def accuracy_under_parallelism(curve: Curve, best: float) -> float:
    """The area under a curve, in percent times tokens per forward (AUP, of the authors of d3LLM).

    The first point counts from 0, and then each trapezoid, its accuracies weighted by min(exp(-3 (1 - accuracy /
    ``best``)), 1). Points more than 5 points of percent below the first one are left out. Plain decoding that is always
    right has 100.
    """
    if not curve or best <= 0:
        return 0.0
    first = curve[0]
    kept = [point for point in curve if point.accuracy >= first.accuracy - _MOST_LOST]
    heights = [each.accuracy * min(math.exp(-_STEEP * (1 - each.accuracy / best)), 1) for each in kept]
    area = first.tokens_per_forward * first.accuracy
    for at in range(1, len(kept)):
        width = kept[at].tokens_per_forward - kept[at - 1].tokens_per_forward
        area += width * (heights[at] + heights[at - 1]) / 2
    return 100 * area


def best_accuracy(own: Iterable[Point]) -> float:
    """The best accuracy that any setting reached; 0 without points."""
    return max((point.accuracy for point in own), default=0.0)


def kept(own: Sequence[Point]) -> dict[str, Point]:
    """For each selector the most parallel setting that keeps `KEPT` of the task's best accuracy, if there is one."""
    least = KEPT * best_accuracy(own)
    fine = {name: [p for p in curve if p.accuracy >= least > 0] for name, curve in by_selector(own).items()}
    return {name: max(each) for name, each in fine.items() if each}


def kept_lossy(rows: Iterable[Row], model: str) -> list[Kept]:
    """All lossy settings of a model that keep `KEPT` of the best accuracy of a task, for calibration to read."""
    rows = [row for row in rows if row.cell.part == PART and row.cell.model == model and row.requests]
    found = []
    for task in sorted({row.cell.workload for row in rows}):
        own = [row for row in rows if row.cell.workload == task]
        least = KEPT * max(row.values["right"] / row.requests for row in own)
        found += [
            Kept(
                task=task,
                strategy=row.cell.strategy,
                tokens_per_forward=round(tokens_per_step(row.tokens, row.steps), 4),
                right=int(row.values["right"]),
                problems=row.requests,
            )
            for row in own
            if row.exactness == Exactness.LOSSY and row.values["right"] / row.requests >= least > 0
        ]
    return found


def most_parallel(means: Iterable[Point], least: float) -> float | None:
    """PBx: the most tokens per forward, in the mean over tasks, at which the mean accuracy is at least this."""
    return max((point.tokens_per_forward for point in means if point.accuracy >= least), default=None)


def models_of(table: Mapping[tuple[str, str], object]) -> list[str]:
    """The models that have points, in the order of the rows."""
    return list(dict.fromkeys(model for model, _ in table))
