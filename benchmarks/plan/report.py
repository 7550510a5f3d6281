"""Writes the page: errors of predicted forwards, and the plan's choices beside the best ones and a constant guess."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.pages import about, table
from benchmarks.plan.cells import BUDGETS, PLAIN
from parlay.bench.records import Row

ERROR_GOAL, RIGHT_GOAL, MARGIN_GOAL, PLAIN_GOAL = 0.2, 8, 3, 3


def report(header: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the page in Markdown."""
    return "\n".join(["# What `parlay plan` says, and what is", "", about(header), "", *_forwards(rows), *_cells(rows)])


def _forwards(rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row.cell.part == "forwards"]
    if not own:
        return []
    errors = [error(row) for row in own]
    lines = [_forward_line(model, [row for row in own if row.cell.model == model]) for model in _in_order(own)]
    verdict = "met" if median(errors) < ERROR_GOAL else "missed"
    return [
        "## Forwards of shapes that were not fitted",
        "",
        f"One sequence. Median error {median(errors):.1%} over {len(errors)} forwards (goal: under {ERROR_GOAL:.0%}, "
        f"{verdict}). Error is |predicted / measured - 1|.",
        "",
        *table(["shape", "median error", "worst", "milliseconds at 1 and 16 rows, least context", "predicted"], lines),
    ]


def _forward_line(model: str, own: Sequence[Row]) -> list[str]:
    least = min(row.values["context"] for row in own)
    ends = [row for row in own if row.values["context"] == least]
    ends = [min(ends, key=lambda row: row.values["rows"]), max(ends, key=lambda row: row.values["rows"])]
    measured, predicted = (
        " and ".join(f"{1000 * row.values[name]:.2f}" for row in ends) for name in ("measured", "predicted")
    )
    errors = [error(row) for row in own]
    return [model, f"{median(errors):.1%}", f"{max(errors):.0%}", measured, predicted]


def error(row: Row) -> float:
    """Return the relative error of a predicted forward."""
    return abs(row.values["predicted"] / row.values["measured"] - 1)


def _cells(rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row.cell.part == "cells"]
    names = list(dict.fromkeys(row.cell.workload for row in own))
    if not names:
        return []
    cells = {name: rates([row for row in own if row.cell.workload == name]) for name in names}
    fastest = {name: best(measured) for name, (measured, _) in cells.items()}
    chosen = {name: best(predicted) for name, (_, predicted) in cells.items()}
    right = sum(fastest[name] == chosen[name] for name in names)
    guess = max(BUDGETS, key=lambda strategy: list(fastest.values()).count(strategy))
    constant = list(fastest.values()).count(guess)
    plain = list(fastest.values()).count(PLAIN)
    met = right >= min(RIGHT_GOAL, len(names)) and right - constant >= MARGIN_GOAL and plain >= PLAIN_GOAL
    lines = [[name, *map(str, _cell(*cells[name])), fastest[name], chosen[name]] for name in names]
    return [
        "## Strategies chosen",
        "",
        f"Right in {right} of {len(names)} cells, the best constant guess (`{guess}`) in {constant}; plain decoding is "
        f"fastest in {plain}. Goal, of ten: {RIGHT_GOAL}, {MARGIN_GOAL} more than the guess, and that in "
        f"{PLAIN_GOAL} or more: {'met' if met else 'missed'}. Tokens per second, measured / predicted.",
        "",
        *table(["cell", *BUDGETS, "fastest", "chosen"], lines),
    ]


def rates(own: Sequence[Row]) -> tuple[dict[str, float], dict[str, float]]:
    """Return tokens per second of each strategy: measured, as the median of its rounds, and predicted."""
    measured = {name: median(row.tokens_per_second for row in own if row.cell.strategy == name) for name in BUDGETS}
    predicted = {row.cell.strategy: row.values["predicted"] for row in own}
    return measured, predicted


def best(speeds: dict[str, float]) -> str:
    """Return the fastest strategy; if several are equal, the first of the list, which is plain decoding."""
    return max(BUDGETS, key=lambda name: speeds[name])


def _cell(measured: dict[str, float], predicted: dict[str, float]) -> list[str]:
    return [f"{measured[name]:.0f} / {predicted[name]:.0f}" for name in BUDGETS]


def _in_order(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.cell.model for row in rows))
