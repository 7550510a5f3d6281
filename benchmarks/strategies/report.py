"""Writes the tables of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages import about, number, same, table
from benchmarks.strategies.replays import PART as REPLAY
from benchmarks.strategies.speed import DRAFT_STEPS, IDEAL
from benchmarks.strategies.speed import PART as SPEED
from parlay.bench.records import OURS, PLAIN, Cell, Row, System
from parlay.bench.summary import CellSummary, Measurements, geometric_means

EXPLAIN = 0.15
"""A gap between ideal and measured speed above which the table marks a strategy."""


def report(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the page in Markdown."""
    found = Measurements(rows)
    lines = ["# Strategies on real text", "", about(header), ""]
    lines += replay_table(found.only(lambda cell: cell.part == REPLAY))
    for model, own in models(found):
        lines += [f"## Speed against plain decoding: {model}", "", f"Times `{PLAIN}`, tokens per step in brackets.", ""]
        lines += speed_table(own)
        lines += [f"## Measured against the formula: {model}", "", *gap_table(own)]
    return "\n".join(lines)


def models(found: Measurements) -> list[tuple[str, Measurements]]:
    """Return the timings by model."""
    timed = found.only(lambda cell: cell.part == SPEED)
    names = timed.each(lambda cell: cell.model)
    return [(name, Measurements(row for row in timed.rows if row.cell.model == name)) for name in names]


def replay_table(found: Measurements) -> list[str]:
    """Write a table of tokens per step, and of the time that proposing took."""
    if not found.rows:
        return []
    kinds = found.each(lambda cell: cell.workload)
    lines = []
    for strategy in found.each(lambda cell: cell.strategy):
        rows = {row.cell.workload: row for row in found.rows if row.cell.strategy == strategy}
        slowest = max(row.draft_seconds / row.steps if row.steps else 0.0 for row in rows.values())
        lines.append((f"`{strategy}`", *(replay_cell(rows.get(kind)) for kind in kinds), f"{1e6 * slowest:.0f}"))
    title = (
        "Exact for those texts: the drafters here don't look at the target. Every text came out as recorded, unless a "
        "cell says otherwise. Tokens are those of the built-in tokenizer."
    )
    head = ("strategy", *kinds, "us of drafting a step")
    return ["## Tokens per step on recorded answers", "", title, "", *table(head, lines)]


def replay_cell(row: Row | None) -> str:
    """Write tokens per step, or the error."""
    if row is None:
        return ""
    return row.error or f"{row.tokens_per_step:.2f}" + ("" if row.same == row.of else " (text differs)")


def speed_table(found: Measurements) -> list[str]:
    """Write a table of speed and tokens per step by kind of text."""
    kinds = found.each(lambda cell: cell.workload)
    lines = []
    for strategy in found.each(lambda cell: cell.strategy):
        own = of_strategy(found, strategy)
        failed = next((row.error for row in own.rows if row.error), "")
        summaries = [each for cell in own.cells if (each := found.summary(cell)) is not None]
        mean, _ = geometric_means(summaries).get(strategy, (None, 0))
        cells = (ratio_cell(found, own, kind) for kind in kinds)
        lines.append((f"`{strategy}`", *cells, failed or number(mean), same(own.rows)))
    return table(("strategy", *kinds, "geometric mean", "same text"), lines)


def of_strategy(found: Measurements, strategy: str) -> Measurements:
    return found.only(lambda cell: cell.system == System(OURS, strategy))


def ratio_cell(found: Measurements, own: Measurements, kind: str) -> str:
    """Write a strategy's ratio to plain decoding, and its tokens per step, on a kind of text."""
    each = summary_of(found, own, kind)
    return f"{each.ratio.median:.2f} ({each.tokens_per_step or 0:.1f})" if each and each.ratio else ""


def summary_of(found: Measurements, own: Measurements, kind: str) -> CellSummary | None:
    cell: Cell | None = next((cell for cell in own.cells if cell.workload == kind), None)
    return found.summary(cell) if cell else None


def gap_table(found: Measurements) -> list[str]:
    """Write a table of measured and ideal speed, over all kinds of text together."""
    head = ("strategy", "tokens per step", "rows", "measured", "ideal", "measured / ideal")
    plain = timed(found, PLAIN)
    names = (name for name in found.each(lambda cell: cell.strategy) if name != PLAIN and timed(found, name))
    return table(head, (gap_line(name, timed(found, name), plain) for name in names))


def timed(found: Measurements, strategy: str) -> list[Row]:
    return [row for row in found.rows if row.cell.strategy == strategy and row.decode_seconds]


def gap_line(strategy: str, own: Sequence[Row], every: Sequence[Row]) -> tuple[str, ...]:
    """Return a strategy's row. Of plain decoding's rows, ``every``, those of the same workloads and rounds count."""
    beside = {(row.cell.workload, row.round) for row in own}
    plain = [row for row in every if (row.cell.workload, row.round) in beside]
    measured, ideal = rate(own) / rate(plain), ideal_rate(own) / ideal_rate(plain)
    mark = "" if abs(measured / ideal - 1) <= EXPLAIN else " (*)"
    drafts = sum(row.values[DRAFT_STEPS] for row in own)
    rows = 1 + sum(row.proposed for row in own) / drafts if drafts else 1.0
    steps = sum(row.tokens for row in own) / sum(row.steps for row in own)
    figures = (steps, rows, measured, ideal)
    return (f"`{strategy}`", *(number(each) for each in figures), f"{measured / ideal:.2f}{mark}")


def rate(rows: Sequence[Row]) -> float:
    """Return decoded tokens per second of all rows together."""
    return sum(row.decode_tokens for row in rows) / sum(row.decode_seconds for row in rows)


def ideal_rate(rows: Sequence[Row]) -> float:
    """Return decoded tokens per ideal second."""
    return sum(row.decode_tokens for row in rows) / sum(row.values[IDEAL] for row in rows)
