"""Makes the sections of a report: tables of rows, and of ratios to plain decoding in the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import geometric_mean
from typing import NamedTuple

from parlay.bench.forwards import curves, is_forward, reading
from parlay.bench.records import PLAIN, Row
from parlay.bench.report.markdown import Section, Table, number, spread
from parlay.bench.summary import CellSummary, Spread, ratio, summarise

SPEED, STEPS = "Speed by workload and strategy", "Tokens per step on recorded answers"
POSITIONS, FORWARDS = "Acceptance by position", "Cost of a forward by rows and context"
CELLS, FAILED = "Every cell", "What failed, or was left out"
FEWEST = 20
"""Positions with fewer proposals than this are left out."""
SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Conditions(NamedTuple):
    """The conditions of a comparison, the same for all its systems."""

    part: str
    model: str
    concurrency: int
    temperature: float
    context: int
    busy: int
    modelled: bool

    @staticmethod
    def of(row: Row) -> Conditions:
        cell = row.cell
        return Conditions(
            cell.part, cell.model, cell.concurrency, cell.temperature, cell.context, cell.busy, row.modelled
        )

    @property
    def words(self) -> str:
        """A heading that lists the conditions that are not the usual ones."""
        words = [
            self.part,
            self.model,
            f"{self.concurrency} requests at once" if self.concurrency != 1 else "",
            f"temperature {self.temperature:g}" if self.temperature else "",
            f"{self.context} tokens of context" if self.context else "",
            f"{self.busy} other busy processes" if self.busy else "",
            "modelled, not measured" if self.modelled else "",
        ]
        return "; ".join(filter(None, words))


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return all sections in order. Failures have a section only if something failed."""
    failed = failures(rows)
    parts = [by_workload(rows), by_position(rows), forwards(rows), every_cell(rows)]
    recorded = steps_alone(rows)
    return [*([recorded] if recorded.tables else []), *parts, *([failed] if failed.tables else [])]


# ------------------------------------------------------------------------------------------------------------ speed


def by_workload(rows: Sequence[Row]) -> Section:
    """Return the section of ratios to plain decoding, with a table for each set of conditions that was timed."""
    tables = [_ratios(where, own) for where, own in _parts(_decoded(rows)) if any(row.tokens_per_second for row in own)]
    text = (
        "Speed as a multiple of plain decoding of the same requests: the median of ratios within rounds. Tokens per "
        "step are in brackets. The mean is geometric, over the workloads that both decoded."
    )
    return Section(SPEED, text if tables else "no row holds a speed", tuple(tables))


def ratios(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Return how many times as fast as plain decoding a system was, by workload."""
    found: dict[str, float] = {}
    for kind in _workloads(rows):
        value = ratio(_rows_of(rows, name, kind), _rows_of(rows, PLAIN, kind))
        found |= {kind: value.median} if value is not None else {}
    return found


def _ratios(where: Conditions, rows: Sequence[Row]) -> Table:
    kinds, names = _workloads(rows), _systems(rows)
    every = {name: ratios(rows, name) for name in names}

    def cell(name: str, kind: str) -> str:
        own = _rows_of(rows, name, kind)
        if own and not any(row.tokens for row in own):
            return "no tokens"
        steps = _tokens_per_step(own)
        return f"{every[name][kind]:.2f}" + (f" ({steps:.1f})" if steps else "") if kind in every[name] else ""

    lines = [
        (name, _mean(every[name], kinds), *(cell(name, kind) for kind in kinds), _rate(rows, name), _same(rows, name))
        for name in sorted(names, key=lambda name: -_geometric(every[name].values()))
    ]
    return Table(("strategy", "mean", *kinds, "tokens/s", "same text"), tuple(lines), where.words)


def steps_alone(rows: Sequence[Row]) -> Section:
    """Return the section of tokens per step, from rows whose speed was not measured."""
    tables = []
    for where, own in _parts([row for row in _decoded(rows) if row.steps and not row.tokens_per_second]):
        kinds = _workloads(own)
        steps = {
            name: {kind: value for kind in kinds if (value := _tokens_per_step(_rows_of(own, name, kind)))}
            for name in _systems(own)
        }
        lines = [
            (
                name,
                _mean(steps[name], kinds),
                *(number(steps[name].get(kind), ".2f") for kind in kinds),
                _same(own, name),
            )
            for name in sorted(steps, key=lambda name: -_geometric(steps[name].values()))
        ]
        tables.append(Table(("strategy", "mean", *kinds, "same text"), tuple(lines), where.words))
    text = (
        "Steps are counted but not timed, because recorded answers were decoded without their model. For these texts "
        "the numbers are exact, because these strategies read only the text. The mean is geometric."
    )
    return Section(STEPS, text, tuple(tables))


def _rate(rows: Sequence[Row], name: str) -> str:
    """Return tokens per second, as the geometric mean over workloads, and how many of them it covers if not all."""
    kinds = _workloads(rows)
    rates = {kind: Spread.of(row.tokens_per_second for row in _rows_of(rows, name, kind)) for kind in kinds}
    return _mean({kind: rate.median for kind, rate in rates.items() if rate and rate.median}, kinds, ".1f")


def _mean(values: Mapping[str, float], kinds: Sequence[str], form: str = ".2f") -> str:
    """Return the geometric mean of the values, and how many of the workloads it covers if not all."""
    some = f" ({len(values)} of {len(kinds)})" if len(values) < len(kinds) else ""
    return f"{geometric_mean(values.values()):{form}}{some}" if values else ""


# ------------------------------------------------------------------------------------------- acceptance and forwards


def by_position(rows: Sequence[Row]) -> Section:
    """Return the section of accepted over proposed nodes by depth in the draft, over all decoded rows."""
    own = [row for row in _decoded(rows) if row.proposed]
    lines = []
    for name in _systems(own):
        proposed = _by_depth(row.proposed_by_position for row in _rows_of(own, name))
        accepted = _by_depth(row.accepted_by_position for row in _rows_of(own, name))
        counts = enumerate(zip_longest(proposed, accepted, fillvalue=0), start=1)
        at = {place: taken / made for place, (made, taken) in counts if made >= FEWEST}
        if at:
            shares = (number(at.get(place), ".2f") for place in SHOWN)
            lines.append((name, f"{sum(accepted) / sum(proposed):.2f}", *shares))
    text = (
        "Accepted over proposed nodes, by their depth in the draft. Few drafts are deep, and these were made long "
        f"because they were likely to be right, so numbers may rise with depth. Depths with fewer than {FEWEST} "
        "proposals are left out."
    )
    if not lines:
        return Section(POSITIONS, "no row counts enough proposed nodes by position")
    return Section(POSITIONS, text, (Table(("strategy", "all", *map(str, SHOWN)), tuple(lines)),))


def _by_depth(counts: Iterable[Sequence[int]]) -> list[int]:
    """Return the sum of the counts at each depth."""
    return [sum(each) for each in zip_longest(*counts, fillvalue=0)]


def forwards(rows: Sequence[Row]) -> Section:
    """Return the section of forwards: for each timed model, seconds by rows and context.

    One column divides the time of only reading as many bytes as the weights have by the time of a forward of one row.
    """
    tables = []
    for part, model in dict.fromkeys((row.cell.part, row.cell.model) for row in rows if is_forward(row) and row.steps):
        timed = [row for row in rows if row.cell.part == part]
        own, read = curves(timed, model), reading(timed, model)
        counts = sorted({int(count) for line in own.values() for count, _ in line})
        lines = []
        for context, line in own.items():
            times, one = dict(line), line[0][1]
            share = f"{read.seconds / one:.0%}" if read else ""
            cells = (f"{times[count] / one:.2f}" if count in times else "" for count in counts)
            lines.append((str(context), f"{1e3 * one:.2f}", share, *cells))
        head = ("context", f"ms of {counts[0]} row", "of reading alone", *map(str, counts))
        tables.append(Table(head, tuple(lines), "; ".join(filter(None, (part, model)))))
    text = (
        "Seconds of a forward that verifies a chain of this many rows, divided by the seconds of one row after the "
        "same text. Drafting is faster than plain decoding if it multiplies tokens per step by more than this. *Of "
        "reading alone*: the time to read as many bytes as the weights have, divided by the time of one row."
    )
    return Section(FORWARDS, text if tables else "no forwards were timed: run with --forwards", tuple(tables))


# ------------------------------------------------------------------------------------------------------------ cells


def every_cell(rows: Sequence[Row]) -> Section:
    """Return the section of all cells, with a table for each set of conditions. Empty columns are left out."""
    tables = []
    for where, own in _parts([row for row in _decoded(rows) if row.requests]):
        lines = [tuple(text(each) for text in COLUMNS.values()) for each in summarise(own)]
        used = [place for place in range(len(COLUMNS)) if any(line[place] for line in lines)]
        head = tuple(list(COLUMNS)[place] for place in used)
        tables.append(Table(head, tuple(tuple(line[place] for place in used) for line in lines), where.words))
    text = (
        "One line for each strategy on each workload: medians, with the lowest and highest round in brackets. "
        "*Looped* is the share of the output that repeats 16 tokens or more of its own. *Draft*, *verify* and *rest* "
        "are shares of the decoding time."
    )
    return Section(CELLS, text if tables else "nothing was decoded", tuple(tables))


def failures(rows: Sequence[Row]) -> Section:
    """Return the section of failures: rows with an error, and rows without requests, whose notes say why."""
    lines = {
        (Conditions.of(row).words, _system(row), row.cell.workload, row.error or row.note): None
        for row in rows
        if row.error or (row.note and not row.requests and not is_forward(row))
    }
    table = Table(("conditions", "strategy", "workload", "why"), tuple(lines))
    return Section(FAILED, "", (table,) if lines else ())


def _sources(each: CellSummary) -> str:
    """Return accepted over proposed nodes for each source of drafts; empty unless there are several sources."""
    made: dict[str, int] = {}
    taken: dict[str, int] = {}
    for row in each.rows:
        for name, count in row.proposed_by_source.items():
            made[name] = made.get(name, 0) + count
            taken[name] = taken.get(name, 0) + row.accepted_by_source.get(name, 0)
    shares = [f"{name} {taken[name] / count:.2f}" for name, count in made.items() if count]
    return ", ".join(shares) if len(shares) > 1 else ""


COLUMNS: Mapping[str, Callable[[CellSummary], str]] = {
    "strategy": lambda each: _system(each.rows[0]),
    "workload": lambda each: each.cell.workload,
    "against plain": lambda each: spread(each.ratio, ".2f"),
    "tokens/s": lambda each: spread(each.speed, ".1f") if any(row.tokens for row in each.rows) else "no tokens",
    "tokens per step": lambda each: number(each.tokens_per_step, ".2f"),
    "accepted": lambda each: number(each.acceptance_rate, ".2f"),
    "by source": _sources,
    "first token, ms": lambda each: number(each.ttft, ".1f", 1e3),
    "between tokens, ms": lambda each: number(each.itl, ".2f", 1e3),
    "draft / verify / rest": lambda each: " / ".join(f"{share:.0%}" for share in each.shares or ()),
    "MiB at most": lambda each: number(each.peak_memory_bytes or None, ".0f", 2**-20),
    "J per token": lambda each: number(each.joules_per_token, ".3f"),
    "J per token, modelled": lambda each: number(each.modelled_joules_per_token, ".3f"),
    "looped": lambda each: number(each.looped, ".2f"),
    "same text": lambda each: f"{each.same[0]}/{each.same[1]}" if each.same else "",
    "exactness": lambda each: each.rows[0].exactness,
    "note": lambda each: each.note,
}


# ------------------------------------------------------------------------------------------------------------- rows


def _decoded(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of decoded text, without failures and timed forwards."""
    return [row for row in rows if not is_forward(row) and not row.error]


def _parts(rows: Sequence[Row]) -> Iterator[tuple[Conditions, list[Row]]]:
    """Yield each set of conditions with its rows, in the order of appearance."""
    for where in dict.fromkeys(map(Conditions.of, rows)):
        yield where, [row for row in rows if Conditions.of(row) == where]


def _system(row: Row) -> str:
    return str(row.cell.system)


def _systems(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(map(_system, rows)))


def _workloads(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.cell.workload for row in rows))


def _rows_of(rows: Iterable[Row], name: str, workload: str | None = None) -> list[Row]:
    """Return the rows of a system, and of one workload if it is given."""
    return [row for row in rows if _system(row) == name and workload in (None, row.cell.workload)]


def _tokens_per_step(rows: Sequence[Row]) -> float:
    """Return committed tokens over steps; 0 if no steps were counted."""
    steps = sum(row.steps for row in rows)
    return sum(row.tokens for row in rows if row.steps) / steps if steps else 0.0


def _same(rows: Iterable[Row], name: str) -> str:
    """Return how many of the compared texts equal plain decoding's; empty if none were compared."""
    own = _rows_of(rows, name)
    compared = sum(row.of for row in own)
    return f"{sum(row.same for row in own)}/{compared}" if compared else ""


def _geometric(values: Iterable[float]) -> float:
    """Return the geometric mean; 0 without values."""
    known = list(values)
    return geometric_mean(known) if known else 0.0
