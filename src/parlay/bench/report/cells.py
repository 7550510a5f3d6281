"""Every cell with all its numbers, and what failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parlay.bench.forwards import is_forward
from parlay.bench.records import Row
from parlay.bench.report.numbers import Conditions, all_conditions, conditions_of, decoded, ratio, system
from parlay.bench.report.pieces import Section, Table
from parlay.bench.summary import CellSummary, Spread, summarise

TITLE = "Every cell"
TEXT = (
    "One line for each strategy on each workload: medians, with the lowest and highest round in brackets. *Looped* is "
    "the share of the output that repeats 16 tokens or more of its own, which flatters strategies that copy; unless a "
    "note says otherwise, texts were cut before it. *Draft*, *verify* and *rest* are shares of the decoding time."
)
FAILED = "What failed, or was left out"


def every_cell(rows: Sequence[Row]) -> Section:
    """A table for each set of conditions, without empty columns."""
    own = [row for row in decoded(rows) if row.requests]
    return Section(TITLE, TEXT, tuple(_table(own, where) for where in all_conditions(own)))


def _table(rows: Sequence[Row], where: Conditions) -> Table:
    here = [row for row in rows if conditions_of(row) == where]
    lines = [
        (*_names(each), _ratio(here, each), *(text(each) for text in COLUMNS.values())) for each in summarise(here)
    ]
    head = ("strategy", "workload", "against plain", *COLUMNS)
    used = [place for place in range(len(head)) if any(line[place] for line in lines)]
    return Table(
        tuple(head[place] for place in used), tuple(tuple(line[at] for at in used) for line in lines), where.words
    )


def failures(rows: Sequence[Row]) -> Section | None:
    """Rows with an error, each once; rows without requests that say why."""
    lines: dict[tuple[str, ...], None] = {}
    for row in rows:
        if row.error or (row.note and not row.requests and not is_forward(row)):
            where = conditions_of(row).words
            lines[where, system(row), row.cell.workload, row.error or row.note] = None
    if not lines:
        return None
    return Section(FAILED, "", (Table(("conditions", "strategy", "workload", "why"), tuple(lines)),))


def _names(each: CellSummary) -> tuple[str, str]:
    return system(each.rows[0]), each.cell.workload


def _ratio(rows: Sequence[Row], each: CellSummary) -> str:
    """The ratio to Parlay's plain decoding, for peers too."""
    return _spread(ratio(rows, system(each.rows[0]), each.cell.workload), ".2f")


def _rate(each: CellSummary) -> str:
    if not any(row.tokens for row in each.rows):
        return "no tokens"
    return _spread(each.speed, ".1f")


def _sources(each: CellSummary) -> str:
    """Accepted of proposed, by source, where there is more than one."""
    names = list(dict.fromkeys(name for row in each.rows for name in row.proposed_by_source))
    made = {name: sum(row.proposed_by_source.get(name, 0) for row in each.rows) for name in names}
    taken = {name: sum(row.accepted_by_source.get(name, 0) for row in each.rows) for name in names}
    shares = [f"{name} {taken[name] / made[name]:.2f}" for name in names if made[name]]
    return ", ".join(shares) if len(shares) > 1 else ""


def _share(place: int) -> Callable[[CellSummary], str]:
    return lambda each: f"{each.shares[place]:.0%}" if each.shares else ""


def _same(each: CellSummary) -> str:
    return f"{each.same[0]}/{each.same[1]}" if each.same else ""


def _number(value: float | None, form: str, times: float = 1) -> str:
    return "" if value is None else format(times * value, form)


def _spread(value: Spread | None, form: str) -> str:
    if value is None:
        return ""
    middle, low, high = (format(number, form) for number in (value.median, value.low, value.high))
    return middle if low == high else f"{middle} ({low}-{high})"


COLUMNS: dict[str, Callable[[CellSummary], str]] = {
    "tokens/s": _rate,
    "tokens per step": lambda each: _number(each.tokens_per_step, ".2f"),
    "accepted": lambda each: _number(each.acceptance_rate, ".2f"),
    "by source": _sources,
    "first token, ms": lambda each: _number(each.ttft, ".1f", 1e3),
    "between tokens, ms": lambda each: _number(each.itl, ".2f", 1e3),
    "draft": _share(0),
    "verify": _share(1),
    "rest": _share(2),
    "MiB at most": lambda each: _number(each.peak_memory_bytes or None, ".0f", 2**-20),
    "J per token": lambda each: _number(each.joules_per_token, ".3f"),
    "looped": lambda each: _number(each.looped, ".2f"),
    "same text": _same,
    "exactness": lambda each: each.rows[0].exactness,
    "note": lambda each: each.note,
}
