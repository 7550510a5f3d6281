"""Speed against concurrency."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.bench.records import PLAIN, Row
from parlay.bench.report.acceptance import SHOWN
from parlay.bench.report.numbers import (
    all_conditions,
    geometric,
    only,
    ratio,
    speed,
    systems,
    timed,
    workloads,
)
from parlay.bench.report.pieces import LineChart, Missing, Panel, Points, Section, Table

TITLE = "Speed against concurrency"
TEXT = (
    "Tokens per second of all requests together, by how many are decoded at once; in brackets how many times as fast "
    "as plain decoding that is. Geometric mean over the workloads that were measured at every concurrency. Drawn are "
    f"plain decoding and the fastest, {SHOWN} at most."
)


def by_concurrency(rows: Sequence[Row]) -> Section | Missing:
    """A table and a panel for each model, temperature and context that was measured at several concurrencies."""
    tables, panels = [], []
    for own in _groups(timed(rows)):
        counts = sorted({row.cell.concurrency for row in own})
        kinds = [kind for kind in workloads(own) if _counts(only(own, workload=kind)) == set(counts)]
        if len(counts) > 1 and kinds:
            title = all_conditions(own)[0].words
            names = systems(own)
            lines = [(name, *(_cell(own, name, kinds, count) for count in counts)) for name in names]
            tables.append(Table(("strategy", *map(str, counts)), tuple(lines), title))
            panels.append(Panel(title, _lines(own, kinds, counts)))
    if not tables:
        return Missing(TITLE, "nothing was measured at more than one concurrency")
    chart = LineChart("", "requests at once", "tokens/s", tuple(panels), log_x=True)
    return Section(TITLE, TEXT, (chart, *tables))


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups of rows that differ only in concurrency, in ascending order."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.cell.concurrency):
        cell = row.cell
        found.setdefault((cell.model, cell.temperature, cell.context, cell.busy, row.modelled), []).append(row)
    return [*found.values()]


def _counts(rows: Sequence[Row]) -> set[int]:
    return {row.cell.concurrency for row in rows}


def _at(rows: Sequence[Row], count: int) -> list[Row]:
    return [row for row in rows if row.cell.concurrency == count]


def _rate(rows: Sequence[Row], name: str, kinds: Sequence[str], count: int) -> float:
    rates = [speed(only(_at(rows, count), name, kind)) for kind in kinds]
    return geometric(rates) if all(rates) else 0.0


def _cell(rows: Sequence[Row], name: str, kinds: Sequence[str], count: int) -> str:
    value = _rate(rows, name, kinds, count)
    ratios = [ratio(_at(rows, count), name, kind) for kind in kinds]
    if not value:
        return ""
    return f"{value:.0f}" + (f" ({geometric([one.median for one in ratios if one]):.2f})" if all(ratios) else "")


def _lines(rows: Sequence[Row], kinds: Sequence[str], counts: Sequence[int]) -> dict[str, Points]:
    """The lines of the chart: plain decoding, and the strategies that are fastest anywhere."""
    every = {
        name: [(count, value) for count in counts if (value := _rate(rows, name, kinds, count))]
        for name in systems(rows)
    }
    drawn = {name: line for name, line in every.items() if line}
    order = sorted(drawn, key=lambda name: (name != PLAIN, -max(value for _, value in drawn[name])))
    return {name: drawn[name] for name in order[:SHOWN]}
