"""The Markdown page of `benchmarks.regimes`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.pages import about, number, table
from benchmarks.regimes.trace import EARLY, LATE, STEPS
from parlay.bench.records import PLAIN, Cell, Row
from parlay.bench.summary import Measurements

AUTO = "auto"
GOAL = 0.95
"""Of the best in hindsight, from the step after a change on that `STEPS` says."""
WHOLE = "whole"
PARTS = (LATE, EARLY, WHOLE)
CLOCK, ALIKE = "clock", "alike"
"""Seconds as measured, and as if each step took what such steps take in the median."""
_FEWEST = 16  # tokens of a part over all rounds, below which nothing is said of it
_FIRST = "start to "  # begins the name of what is no change

Rows = Sequence[Row]


class Speeds:
    """Tokens per second of some rows of one model, by strategy and part of the stretches. ``seconds``: which ones."""

    def __init__(self, rows: Rows, seconds: str = ALIKE) -> None:
        self._rows, self._seconds = rows, seconds
        self.names = list(dict.fromkeys(row.cell.strategy for row in rows if row.cell.strategy != AUTO))

    def of(self, strategy: str, part: str) -> float | None:
        """None where too little was written in that part."""
        own = [row.values for row in self._rows if row.cell.strategy == strategy]
        parts = (EARLY, LATE) if part == WHOLE else (part,)
        tokens = sum(values[f"{each} tokens"] for values in own for each in parts)
        seconds = sum(values[f"{each} {self._seconds}"] for values in own for each in parts)
        return tokens / seconds if tokens >= _FEWEST and seconds > 0 else None

    def best(self, part: str) -> str:
        """The static strategy that was quickest there."""
        return max(self.names, key=lambda name: self.of(name, part) or 0.0)

    def ratio(self, strategy: str, other: str, part: str) -> float | None:
        one, two = self.of(strategy, part), self.of(other, part)
        return one / two if one and two else None

    def of_best(self, part: str) -> float | None:
        """`auto` over the static strategy that was quickest there."""
        return self.ratio(AUTO, self.best(part), part)


def page(header: Mapping[str, Any], rows: Rows) -> str:
    """For each model what it comes to, a line for each change, and one for each stretch."""
    found = Measurements(rows)
    lines = ["# Changes of regime within an answer", "", about(header), "", _how(header), ""]
    for model in found.each(lambda cell: cell.model):
        own = [row for row in rows if row.cell.model == model]
        lines += [f"## {model}", "", *_verdicts(own), *_by_change(own), *_by_stretch(own)]
    return "\n".join(lines)


def _how(header: Mapping[str, Any]) -> str:
    return (
        f"SmolLM2's trained head: {header.get('head', 'not recorded')}. One request at a time, greedy. Every strategy "
        "writes the same given texts: prose that the model itself wrote, a document of the prompt, function calls as "
        f"JSON. *{LATE}*: the tokens of a stretch from `{AUTO}`'s step {STEPS + 1} in it on. *{EARLY}*: those of its "
        f"first {STEPS} steps, so what the change costs. Every strategy is timed for the same tokens. *{CLOCK}*: by "
        f"the clock, where single steps are up to twice as slow by chance. *{ALIKE}*: as if each step took what steps "
        "with as many rows took in the median, and beside the forward what such steps of its strategy did; tables are "
        "in this. *Of the best*: over the static strategy that is quickest for these tokens, known in hindsight only. "
        "The first stretch of a text is no change: it is listed, and not counted."
    )


def _changes(rows: Rows) -> list[str]:
    return sorted({row.cell.part for row in rows}, key=lambda part: (part.startswith(_FIRST), part))


def _verdicts(rows: Rows) -> list[str]:
    """Over all changes, by both kinds of seconds."""
    changed = [row for row in rows if not row.cell.part.startswith(_FIRST)]
    stretches = [*_groups(changed, lambda cell: cell.workload)]
    lines = []
    for part in PARTS:
        for seconds in (ALIKE, CLOCK):
            shares = [share for own in stretches if (share := Speeds(own, seconds).of_best(part)) is not None]
            found = [Speeds(own, seconds).of_best(part) for own in _groups(changed, lambda cell: cell.part)]
            summed = [share for share in found if share is not None]
            if shares:
                means = (f"{geometric_mean(shares):.2f}", f"{min(shares):.2f}")
                by_change = (f"{geometric_mean(summed):.2f}", f"{min(summed):.2f}")
                lines.append((part, seconds, str(len(shares)), *means, *by_change))
    head = ("part", "seconds", "stretches", "of the best", "least", "summed by change", "least")
    count = f"Stretches after a change: {len(stretches)}; rounds: {_rounds(rows)}. Goal: {GOAL:g} late."
    return [count, "", *table(head, lines)]


def _groups(rows: Rows, key: Callable[[Cell], Hashable]) -> Iterator[Rows]:
    """The rows of each key, in the order of first rows."""
    for value in dict.fromkeys(key(row.cell) for row in rows):
        yield [row for row in rows if key(row.cell) == value]


def _rounds(rows: Rows) -> str:
    counts = {len(own) for own in _groups(rows, lambda cell: cell)}
    return f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _by_change(rows: Rows) -> list[str]:
    """Speeds after the first steps, summed over texts, and what `auto` has of the best in each part."""
    names = Speeds(rows).names
    head = ("change", *(f"`{name}`" for name in (*names, AUTO)), *(f"of the best, {part}" for part in PARTS))
    lines = [(part, *_cells([row for row in rows if row.cell.part == part], names, LATE)) for part in _changes(rows)]
    return [f"Times `{PLAIN}` after the first {STEPS} steps, all texts together:", "", *table(head, lines)]


def _by_stretch(rows: Rows) -> list[str]:
    names = Speeds(rows).names
    head = ("stretch", "change", *(f"`{name}`" for name in (*names, AUTO)), *(f"of the best, {part}" for part in PARTS))
    lines = [
        (own[0].cell.workload, own[0].cell.part, *_cells(own, names, WHOLE))
        for own in _groups(rows, lambda cell: cell.workload)
    ]
    return [f"Times `{PLAIN}` over whole stretches:", "", *table(head, lines)]


def _cells(rows: Rows, names: Sequence[str], part: str) -> list[str]:
    speeds = Speeds(rows)
    ratios = [speeds.ratio(name, PLAIN, part) for name in (*names, AUTO)]
    return [number(each) for each in (*ratios, *(speeds.of_best(each) for each in PARTS))]
