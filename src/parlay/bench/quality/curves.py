"""Makes curves of accuracy against tokens per forward, and computes the numbers that summarise a curve."""

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
"""The share of a task's best measured accuracy that a setting must reach to keep the quality."""
_STEEP = 3.0
_MOST_LOST = 0.05


class Point(NamedTuple):
    """One setting on one task, or its mean over tasks. ``accuracy`` is the share of right answers."""

    tokens_per_forward: float
    accuracy: float
    strategy: str = ""


Curve = Sequence[Point]
"""The points of one selector in the order of tokens per forward, fewest first."""


def points(rows: Iterable[Row]) -> dict[tuple[str, str], list[Point]]:
    """Return the points of the rows by model and task, in the order of the rows."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for row in rows:
        if row.cell.part == PART and row.requests:
            speed = tokens_per_step(row.tokens, row.steps)
            point = Point(speed, row.values["right"] / row.requests, row.cell.strategy)
            found[row.cell.model, row.cell.workload].append(point)
    return dict(found)


def by_selector(own: Iterable[Point]) -> dict[str, Curve]:
    """Group points into curves: one for each selector, and one for each strategy without a selector."""
    found: dict[str, list[Point]] = defaultdict(list)
    for point in own:
        found[selector_of(point.strategy)].append(point)
    return {name: sorted(each) for name, each in found.items()}


def frontier(curve: Curve) -> Curve:
    """Return the points of a curve that no other point exceeds in both accuracy and tokens per forward."""
    least, found = -1.0, []
    for point in sorted(curve, reverse=True):
        if point.accuracy > least:
            least = point.accuracy
            found.append(point)
    return found[::-1]


def over_tasks(each: Sequence[Iterable[Point]]) -> list[Point]:
    """Return the means over tasks of each setting that was measured on all of the tasks."""
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
    """Return AUP, the area under a curve in percent times tokens per forward, as the authors of d3LLM define it.

    The area is a rectangle from 0 to the first point, and a trapezoid between each two points. In the trapezoids an
    accuracy is weighted by min(exp(-3 (1 - accuracy / ``best``)), 1). Points whose accuracy is more than 5 percentage
    points below the first point's are left out. Plain decoding that is always right has an area of 100.
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
    """Return the highest accuracy of the points; 0 without points."""
    return max((point.accuracy for point in own), default=0.0)


def kept(own: Sequence[Point]) -> dict[str, Point]:
    """Return, by selector, the setting with the most tokens per forward that keeps `KEPT` of a task's best accuracy.

    Selectors without such a setting are left out.
    """
    least = KEPT * best_accuracy(own)
    fine = {name: [p for p in curve if p.accuracy >= least > 0] for name, curve in by_selector(own).items()}
    return {name: max(each) for name, each in fine.items() if each}


def kept_lossy(rows: Iterable[Row], model: str) -> list[Kept]:
    """Return all lossy settings of a model that keep `KEPT` of a task's best accuracy, for calibrations to read."""
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
    """Return the PBx of ParallelBench: the most mean tokens per forward at a mean accuracy of at least ``least``.

    Returns None if no setting is that accurate.
    """
    return max((point.tokens_per_forward for point in means if point.accuracy >= least), default=None)


def models_of(table: Mapping[tuple[str, str], object]) -> list[str]:
    """Return the models that have points, in the order of the rows."""
    return list(dict.fromkeys(model for model, _ in table))
