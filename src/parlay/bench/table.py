"""Prints summaries as a table of text, or as Markdown for the README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from statistics import median
from typing import NamedTuple

from parlay.bench.against import NAME
from parlay.bench.records import OURS, PLAIN
from parlay.bench.report.markdown import Table, bounds, markdown, number, spread
from parlay.bench.summary import CellSummary, geometric_means, plain_of
from parlay.system.terminal import aligned, counted

ABSENT = "-"
HEAD = ("workload", "strategy", "against plain", "against `transformers` at its best", "tokens per step", "same text")
"""The head of `readme_table`."""


class Column(NamedTuple):
    """A column's head, and its text for a summary."""

    head: str
    text: Callable[[CellSummary], str]


def table(summaries: Sequence[CellSummary], price_per_hour: float | None = None) -> str:
    """Return a line for each summary, then notes and errors, then geometric means of the ratios.

    With the machine's ``price_per_hour``, a column has the tokens per unit of currency.
    """
    columns = [*_what(summaries), *_measures(summaries, price_per_hour)]
    rows = [[column.head for column in columns]]
    rows += [[column.text(each) or ABSENT for column in columns] for each in summaries]
    notes = _remarks(summaries)
    means = [
        f"{strategy}: {mean:.2f} times {PLAIN} in geometric mean over {counted(count, 'cell')}"
        for strategy, (mean, count) in geometric_means(summaries).items()
    ]
    return "\n".join([*aligned(rows, rows[0].index("strategy") + 1), *([""] if notes or means else []), *notes, *means])


def _what(summaries: Sequence[CellSummary]) -> list[Column]:
    """Return the columns that identify the cells. Columns with the same value for all cells are left out."""
    columns = [
        Column("model", lambda each: each.cell.model),
        Column("workload", lambda each: each.cell.workload),
        Column("requests", lambda each: str(each.cell.concurrency)),
        Column("temp.", lambda each: f"{each.cell.temperature:g}"),
        Column("context", lambda each: str(each.cell.context or "as is")),
        Column("busy", lambda each: str(each.cell.busy)),
        Column("strategy", lambda each: str(each.cell.system)),
    ]
    always = {"workload", "strategy"}
    return [column for column in columns if column.head in always or len({column.text(each) for each in summaries}) > 1]


def _measures(summaries: Sequence[CellSummary], price_per_hour: float | None) -> list[Column]:
    columns = [
        Column("tok/s", lambda each: spread(each.speed, ".1f")),
        Column("ratio", lambda each: spread(each.ratio, ".2f")),
        Column("95 %", lambda each: bounds(each.interval.low, each.interval.high) if each.interval else ""),
        Column("tok/step", lambda each: number(each.tokens_per_step, ".2f")),
        Column("accepted", lambda each: number(each.acceptance_rate, ".0%")),
        Column("first ms", lambda each: number(each.ttft, ".1f", 1000)),
        Column("next ms", lambda each: number(each.itl, ".2f", 1000)),
        Column("draft/verify/rest", lambda each: "/".join(f"{share:.0%}" for share in each.shares or ())),
        Column("memory", lambda each: f"{each.peak_memory_bytes / 2**20:.0f}M" if each.peak_memory_bytes else ""),
        Column("looped", lambda each: number(each.looped, ".0%")),
        Column("same", lambda each: f"{each.same[0]}/{each.same[1]}" if each.same else ""),
    ]
    if any(each.joules_per_token is not None for each in summaries):
        columns.append(Column("J/token", lambda each: number(each.joules_per_token, ".4f")))
    if any(each.modelled_joules_per_token is not None for each in summaries):
        columns.append(Column("J/token, modelled", lambda each: number(each.modelled_joules_per_token, ".4f")))
    if price_per_hour is not None:
        columns.append(Column("tok/unit", lambda each: number(each.tokens_per_unit(price_per_hour), ".0f")))
    return columns


def _remarks(summaries: Sequence[CellSummary]) -> list[str]:
    """Return errors and notes. Each comes once, with all workloads that it is about."""
    workloads: dict[tuple[str, str], list[str]] = {}
    for each in summaries:
        remark = (str(each.cell.system), each.error) if each.error else ("", each.note)
        workloads.setdefault(remark, []).append(each.cell.workload)
    everywhere = {each.cell.workload for each in summaries}
    return [
        f"{_where(strategy, dict.fromkeys(own), everywhere)}: {remark}"
        for (strategy, remark), own in workloads.items()
        if remark
    ]


def _where(strategy: str, own: Iterable[str], everywhere: Set[str]) -> str:
    names = list(own)
    if not strategy:
        return ", ".join(names)
    return strategy if len(names) == len(everywhere) else f"{strategy} on {', '.join(names)}"


def readme_table(summaries: Sequence[CellSummary]) -> str:
    """Return a Markdown table with a line for each strategy and workload.

    The ratio to `transformers` is to its fastest measured mode. `transformers` is measured greedily, with one request
    at a time, so cells with a temperature or several requests are left out.
    """
    others = [each for each in summaries if each.cell.engine == NAME]
    own = [each for each in summaries if each.cell.engine == OURS and each.cell.strategy != PLAIN and each.rows]
    alike = [each for each in own if each.cell.concurrency == 1 and not each.cell.temperature]
    return markdown(Table(HEAD, tuple(_line(each, others) for each in alike)))


def _line(each: CellSummary, others: Iterable[CellSummary]) -> tuple[str, ...]:
    beside = [other for other in others if plain_of(other.cell) == plain_of(each.cell)]
    best = _against_best(each, beside)
    return (
        each.cell.workload + (f" behind {each.cell.context:,} tokens" if each.cell.context else ""),
        f"`{each.cell.strategy}`",
        "-" if each.ratio is None else f"{each.ratio.median:.2f}",
        "-" if best is None else f"{best:.1f}",
        "-" if each.tokens_per_step is None else f"{each.tokens_per_step:.2f}",
        f"{each.same[0]}/{each.same[1]}" if each.same else "-",
    )


def _against_best(each: CellSummary, others: Iterable[CellSummary]) -> float | None:
    """Return the median, over rounds, of a cell's speed divided by the highest speed of ``others`` in the same round.

    Returns None if no round has both.
    """
    best: dict[int, float] = {}
    for other in others:
        for row in other.rows:
            best[row.round] = max(best.get(row.round, 0.0), row.tokens_per_second)
    ratios = [row.tokens_per_second / best[row.round] for row in each.rows if best.get(row.round)]
    return median(ratios) if ratios else None
