"""What forwards cost by rows and context, and how much of the memory's bandwidth they reach."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.bench.forwards import curves, is_forward, reading
from parlay.bench.records import Row
from parlay.bench.report.pieces import LineChart, Missing, Panel, Section, Table

TITLE = "Cost of a forward by rows and context"
TEXT = (
    "v(rows, context): seconds of one forward that verifies a chain, against those of one row behind the same text. "
    "Drafting pays while tokens per step grow faster. Medians, each no more than that of a larger forward."
)
BANDWIDTH = "Share of memory bandwidth reached"
BANDWIDTH_TEXT = (
    "A forward of one row must read every weight once. The share is the time that reading as many bytes takes here, "
    "over the time of the forward."
)


def forwards(rows: Sequence[Row]) -> Section | Missing:
    """A table and a panel for each model that was timed."""
    tables, panels = [], []
    for model in _models(rows):
        own = curves(rows, model)
        counts = sorted({int(count) for line in own.values() for count, _ in line})
        lines = []
        for context, line in own.items():
            times, one = dict(line), line[0][1]
            cells = (f"{times[count] / one:.2f}" if count in times else "" for count in counts)
            lines.append((str(context), f"{1e3 * one:.2f}", *cells))
        tables.append(Table(("context", f"ms of {counts[0]} row", *map(str, counts)), tuple(lines), model))
        ratios = {
            f"context {context}": [(count, seconds / line[0][1]) for count, seconds in line]
            for context, line in own.items()
        }
        panels.append(Panel(model, ratios))
    if not tables:
        return Missing(TITLE, "no forwards were timed: run with --forwards")
    chart = LineChart("", "rows of the forward", "times the forward of one row", tuple(panels), log_x=True, level=1.0)
    return Section(TITLE, TEXT, (chart, *tables))


def _models(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.cell.model for row in rows if is_forward(row) and row.steps))


def bandwidth(rows: Sequence[Row]) -> Section | Missing:
    """A line for each model of which forwards and the reading of its weights were timed."""
    lines = []
    for model in _models(rows):
        read = reading(rows, model)
        if read is None:
            continue
        for context, line in curves(rows, model).items():
            seconds = line[0][1]
            reached, alone = read.bytes / seconds, read.bytes / read.seconds
            numbers = (read.bytes / 1e6, 1e3 * seconds, reached / 1e9, alone / 1e9)
            lines.append((model, str(context), *(f"{each:.2f}" for each in numbers), f"{100 * reached / alone:.0f} %"))
    if not lines:
        return Missing(BANDWIDTH, "the reading of weights was not timed: run with --forwards")
    head = ("model", "context", "MB of weights", "ms of a forward", "GB/s", "GB/s of reading alone", "share")
    return Section(BANDWIDTH, BANDWIDTH_TEXT, (Table(head, tuple(lines)),))
