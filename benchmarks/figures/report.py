"""The Markdown page of a file of results: one section for each part, each with its goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.pages import HOW, about, number, same, shown, table
from parlay.bench.against import AS_IT_COMES, NAME
from parlay.bench.prepare import LOOPS
from parlay.bench.records import OURS, PLAIN, Cell, Row, System
from parlay.bench.summary import CellSummary, Measurements, Spread, geometric_means, plain_of, ratio
from parlay.llm import DEFAULT_STRATEGY

Line = Sequence[str]


def report(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The page."""
    lines = ["# Figures", "", about(header), "", HOW, ""]
    for section in (plain, lookup, draft, adversary, overhead, launch, versus):
        found = Measurements(row for row in rows if row.cell.part == section.__name__)
        lines += section(found) if found.rows else []
    return "\n".join(lines)


def by_model(found: Measurements) -> Iterator[tuple[str, Measurements]]:
    """The models, in order, and what was measured on each."""
    for model in found.each(lambda cell: cell.model):
        yield model, Measurements(row for row in found.rows if row.cell.model == model)


def of_system(found: Measurements, system: System) -> Measurements:
    return found.only(lambda cell: cell.system == system)


def plain(found: Measurements) -> list[str]:
    """`none` against every combination."""
    lines = ["## Plain decoding against transformers", ""]
    head = ("system", "tokens/s", f"{PLAIN} is faster by", "same", "")
    for model, own in by_model(found):
        cells = [plain_line(own, system) for system in own.each(lambda cell: cell.system)]
        lines += [f"{model}. Goal: at least 1.3 times the best combination, 1.5 times the default. Loops are kept.", ""]
        lines += table(head, sorted(cells, key=lambda cell: -float(cell[1] or 0)))
    return lines


def plain_line(found: Measurements, system: System) -> Line:
    """One system's line, over both texts together."""
    own = of_system(found, system)
    errors = [row.error for row in own.rows if row.error]
    if errors:
        return (str(system), "", "", "", f"failed: {errors[0]}")
    note = "default" if system == System(NAME, AS_IT_COMES) else ""
    faster = ratio(together(of_system(found, System(OURS, PLAIN))), together(own))
    speed = Spread.of(row.tokens_per_second for row in together(own))
    return (str(system), f"{speed.median if speed else 0:.1f}", shown(faster), same(own.rows), note)


def together(found: Measurements) -> list[Row]:
    """All texts of a round as one row."""
    rounds: dict[int, Row] = {}
    for row in found.rows:
        if row.round in rounds:
            one = rounds[row.round]
            row = replace(
                one,
                decode_tokens=one.decode_tokens + row.decode_tokens,
                decode_seconds=one.decode_seconds + row.decode_seconds,
            )
        rounds[row.round] = row
    return [*rounds.values()]


def lookup(found: Measurements) -> list[str]:
    """Prompt lookup on edits and copies."""
    lines = ["## Prompt lookup on edits and copies", "", "Goal: at least 3 times plain decoding.", ""]
    return lines + strategy_tables(found)


def draft(found: Measurements) -> list[str]:
    """The draft model on all kinds of text."""
    lines = ["## Draft model on every kind of text", ""]
    lines += ["Goal: `draft-model` at least 1.2 times plain decoding in geometric mean.", ""]
    return lines + strategy_tables(found)


def adversary(found: Measurements) -> list[str]:
    """Drafters that are wrong on purpose."""
    goal = "Goal: at least 0.98 of plain decoding. Each request meets a policy that knows nothing. Loops are kept."
    return ["## Drafters that are wrong on purpose", "", goal, "", *strategy_tables(found)]


def strategy_tables(found: Measurements) -> list[str]:
    """For each model and strategy: a line for each kind of text, and the geometric mean."""
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
    """One for each cell of a system."""
    cells = of_system(found, system).cells
    return [each for cell in cells if (each := found.summary(cell)) is not None]


def left_out(found: Measurements) -> list[str]:
    """What was not measured because the text loops at once."""
    notes = {f"{row.cell.workload}: {row.note}": None for row in found.rows if LOOPS in row.note}
    return [f"{'; '.join(notes)}.", ""] if notes else []


def strategy_line(each: CellSummary) -> Line:
    """One strategy on one kind of text."""
    kind = each.cell.workload
    if each.error:
        return (kind, f"failed: {each.error}", "", "", "", "", "")
    tokens = sum(row.tokens for row in each.rows)
    steps, accepted = number(each.tokens_per_step), number(each.acceptance_rate)
    equal = "/".join(map(str, each.same or ()))
    return (kind, shown(each.ratio), steps, accepted, equal, str(tokens), number(each.looped))


def overhead(found: Measurements) -> list[str]:
    """Milliseconds of a step besides its forward."""
    parts = ("besides", "besides p90", "propose", "verify", "accept", "commit", "observe", "report", "rest", "tokens")
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
    """Seconds to the first text."""
    first = Spread.of(row.ttft[0] for row in found.rows)
    lines = ["## From the command to the first text", ""]
    return [*lines, f"`parlay generate`, warm disk: {shown(first)} s. Goal: within 5 s.", ""]


def versus(found: Measurements) -> list[str]:
    """The default strategy against transformers, by workload."""
    lines = ["## The default strategy by workload", ""]
    lines += [
        "Against plain decoding by Parlay, and against the fastest that transformers has for that workload: its best "
        "plain combination, its prompt lookup, or its assisted generation with the draft model. Its texts may differ "
        "in the last place of bf16; its own *same* stands in the last column.",
        "",
    ]
    head = ("workload", "against plain", "against transformers at its best", "same text", "tokens per step", "its best")
    for model, own in by_model(found):
        defaults = summaries_of(own, System(OURS, DEFAULT_STRATEGY))
        lines += [model, "", *table(head, [versus_line(own, each) for each in defaults if each.rows])]
        lines += [*every_system(own), *left_out(own)]
    return lines


def versus_line(found: Measurements, each: CellSummary) -> Line:
    """One workload."""
    beside = found.only(lambda cell: plain_of(cell) == plain_of(each.cell) and cell.engine == NAME)
    best = max(beside.cells, key=lambda cell: rate_of(found, cell), default=None)
    note = f"{best.strategy}, same {same(found.of(best))}" if best else "-"
    return (
        each.cell.workload,
        shown(each.ratio),
        shown(found.ratio(each.cell, best) if best else None),
        "/".join(map(str, each.same or ())),
        number(each.tokens_per_step),
        note,
    )


def every_system(found: Measurements) -> list[str]:
    """Tokens per second of every system on every workload."""
    kinds = found.each(lambda cell: cell.workload)
    lines = []
    for system in found.each(lambda cell: cell.system):
        rates = {cell.workload: rate_of(found, cell) for cell in of_system(found, system).cells}
        lines.append((str(system), *(f"{rates.get(kind, 0):.1f}" for kind in kinds)))
    return table(("tokens/s", *kinds), lines)


def rate_of(found: Measurements, cell: Cell) -> float:
    """Tokens per second in the median round; 0 without one."""
    each = found.summary(cell)
    return each.speed.median if each and each.speed else 0.0
