"""Writes the Markdown page of a file of results: one section for each part, with its goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.pages import HOW, about, number, shown, table
from parlay.bench.prepare import LOOPS
from parlay.bench.records import OURS, PLAIN, Row, System
from parlay.bench.summary import CellSummary, Measurements, Spread, geometric_means

Line = Sequence[str]


def report(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the page."""
    lines = ["# Figures", "", about(header), "", HOW, ""]
    for section in (launch, adversary, overhead):
        found = Measurements(row for row in rows if row.cell.part == section.__name__)
        lines += section(found) if found.rows else []
    return "\n".join(lines)


def by_model(found: Measurements) -> Iterator[tuple[str, Measurements]]:
    """Yield each model, in order, with its measurements."""
    for model in found.each(lambda cell: cell.model):
        yield model, Measurements(row for row in found.rows if row.cell.model == model)


def of_system(found: Measurements, system: System) -> Measurements:
    return found.only(lambda cell: cell.system == system)


def adversary(found: Measurements) -> list[str]:
    """Return the section on drafters that are wrong on purpose."""
    goal = (
        "Goal: at least 0.98 of plain decoding. Each request starts with a policy that has learned nothing. Loops are "
        "kept."
    )
    return ["## Drafters that are wrong on purpose", "", goal, "", *strategy_tables(found)]


def strategy_tables(found: Measurements) -> list[str]:
    """Return a table for each model and strategy: a row for each kind of text, and the geometric mean."""
    lines: list[str] = []
    heads = ("speed against none", "tokens per step", "accepted", "same", "tokens", "looped")
    for model, own in by_model(found):
        for strategy in (name for name in own.each(lambda cell: cell.strategy) if name != PLAIN):
            summaries = summaries_of(own, System(OURS, strategy))
            cells = [strategy_line(each) for each in summaries]
            mean, _ = geometric_means(summaries).get(strategy, (None, 0))
            cells.append(("**geometric mean**", f"**{number(mean)}**", "", "", "", "", ""))
            lines += table((f"{strategy} on {model}", *heads), cells)
        lines += left_out(own)
    return lines


def summaries_of(found: Measurements, system: System) -> list[CellSummary]:
    """Return a summary for each cell of a system."""
    cells = of_system(found, system).cells
    return [each for cell in cells if (each := found.summary(cell)) is not None]


def left_out(found: Measurements) -> list[str]:
    """Name the texts that were not measured because they loop at once."""
    notes = {f"{row.cell.workload}: {row.note}": None for row in found.rows if LOOPS in row.note}
    return [f"{'; '.join(notes)}.", ""] if notes else []


def strategy_line(each: CellSummary) -> Line:
    """Return the table row of one strategy on one kind of text."""
    kind = each.cell.workload
    if each.error:
        return (kind, f"failed: {each.error}", "", "", "", "", "")
    tokens = sum(row.tokens for row in each.rows)
    steps, accepted = number(each.tokens_per_step), number(each.acceptance_rate)
    equal = "/".join(map(str, each.same or ()))
    return (kind, shown(each.ratio), steps, accepted, equal, str(tokens), number(each.looped))


def overhead(found: Measurements) -> list[str]:
    """Return the section on the milliseconds of a step besides its forward."""
    parts = ("besides", "besides p90", "propose", "verify", "accept", "commit", "observe", "rest", "tokens")
    lines = ["## A step besides the forward", ""]
    lines += [
        "Milliseconds of the median step against a target that answers at once (`tokens`: committed per step and "
        "sequence; `rest`: scheduling and counting). Goal, without drafts: 0.3 at batch 1 greedy, 2 at batch 32.",
        "",
    ]
    for model, own in by_model(found):
        cells = []
        for cell in own.cells:
            values = (median(row.values[part] for row in own.of(cell)) for part in parts)
            cells.append((cell.strategy, str(cell.concurrency), cell.workload, *(f"{value:.3f}" for value in values)))
        head = ("strategy", "batch", "tokens chosen", *parts)
        lines += [f"Vocabulary {model.split()[-1]}", "", *table(head, cells)]
    return lines


def launch(found: Measurements) -> list[str]:
    """Return the section on the seconds from the command to the first text."""
    first = Spread.of(row.ttft[0] for row in found.rows)
    lines = ["## From the command to the first text", ""]
    return [*lines, f"`parlay generate`, warm disk: {shown(first)} s. Goal: within 5 s.", ""]
