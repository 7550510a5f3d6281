"""The page of a file of rows: what each engine keeps of its idle speed, what drafting still wins, and the goals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.busy.plans import ENGINES, FORETOLD, PREDICTION
from benchmarks.figures.report import about, table
from parlay.bench.records import PLAIN, Cell, Row
from parlay.bench.summary import Spread, Summary, summarise
from parlay.llm import DEFAULT_STRATEGY

LLAMA = "llama-cpp-python"
KEPT = {1: 0.6, 2: 0.45}
"""By busy processes, for two cores: the least share of its idle speed that plain decoding should keep."""
AHEAD = 3.0
NO_LOSS = 0.95
GAIN, GAIN_KEPT = 1.2, 0.8
RIGHT_KEPT = 0.9
EXPLANATION = (
    "While a cell is measured so many other processes burn a core each. Everything is greedy, one request at a time, "
    "interleaved in one run. Shares and ratios are taken within each round: the median round, with the lowest and the "
    "highest in brackets.",
)
VERDICTS = {True: "met", False: "**not met**", None: "not measured"}


@dataclass(frozen=True, slots=True)
class Goal:
    """Something that should hold, and whether it does; ``met`` None: it was not measured."""

    words: str
    met: bool | None


class Model:
    """The rows of one model, by cell."""

    def __init__(self, name: str, rows: Iterable[Row]) -> None:
        self.name = name
        self._by_cell: dict[Cell, dict[int, Row]] = {}
        for row in rows:
            self._by_cell.setdefault(row.cell, {})[row.round] = row
        self.rows = [row for own in self._by_cell.values() for row in own.values()]
        self.busy = sorted({row.cell.busy for row in self.rows})
        self.kinds = [name for name in self.workloads if name not in (ENGINES, FORETOLD)]

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(row.cell.workload for row in self.rows))

    def strategies(self, workload: str) -> list[str]:
        """In the order of their rows."""
        return list(dict.fromkeys(row.cell.strategy for row in self.rows if row.cell.workload == workload))

    def cell(self, workload: str, strategy: str, busy: int) -> Cell:
        return Cell(model=self.name, strategy=strategy, workload=workload, busy=busy)

    def summary(self, workload: str, strategy: str, busy: int) -> Summary | None:
        cell = self.cell(workload, strategy, busy)
        return next(iter(summarise(self.rows, [cell])), None)

    def kept(self, workload: str, strategy: str, busy: int) -> Spread | None:
        """Speed over that of the same strategy on an idle machine, round by round."""
        cell = self.cell(workload, strategy, busy)
        return self._over(cell, replace(cell, busy=0))

    def ratio(self, workload: str, strategy: str, busy: int, base: str = PLAIN) -> Spread | None:
        """Speed over that of ``base`` beside as many busy processes, round by round."""
        cell = self.cell(workload, strategy, busy)
        return self._over(cell, replace(cell, strategy=base))

    def _over(self, above: Cell, below: Cell) -> Spread | None:
        over, under = self._speeds(above), self._speeds(below)
        return Spread.of(over[turn] / under[turn] for turn in over if turn in under)

    def _speeds(self, cell: Cell) -> Mapping[int, float]:
        rows = self._by_cell.get(cell, {})
        return {turn: row.tokens_per_second for turn, row in rows.items() if row.tokens_per_second}


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Everything, one model after the other."""
    lines = ["# Beside busy processes", "", about(dict(header))[0], "", *EXPLANATION, ""]
    for name in dict.fromkeys(row.cell.model for row in rows):
        lines += section(Model(name, [row for row in rows if row.cell.model == name]))
    return "\n".join(lines)


def section(model: Model) -> list[str]:
    """One model."""
    lines = [f"## {model.name}", "", f"Rounds: {len({row.round for row in model.rows})}.", ""]
    lines += [
        f"{'met' if goal.met else '**not met**'}: {goal.words}  " for goal in goals(model) if goal.met is not None
    ]
    lines += ["", "Plain decoding of prose by each engine: tokens per second, and the share of its own idle speed.", ""]
    lines += engines(model)
    lines += [f"`{DEFAULT_STRATEGY}` against `{PLAIN}`, by kind of text:", "", *by_kind(model)]
    lines += ["A prediction that is right in every letter:", "", *predictions(model)]
    return lines + failures(model)


def engines(model: Model) -> list[str]:
    head = ("engine", "idle", *(f"beside {busy}" for busy in model.busy if busy))
    lines = []
    for strategy in model.strategies(ENGINES):
        cells = [f"{speed_of(model.summary(ENGINES, strategy, 0))}"]
        for busy in filter(None, model.busy):
            speed = speed_of(model.summary(ENGINES, strategy, busy))
            cells.append(f"{speed}, {shown(model.kept(ENGINES, strategy, busy))}")
        lines.append((f"parlay {strategy}" if strategy == PLAIN else strategy, *cells))
    return table(head, lines)


def by_kind(model: Model) -> list[str]:
    head = ("text", *(f"beside {busy}" if busy else "idle" for busy in model.busy))
    lines = []
    for kind in model.kinds:
        ratios = (shown(model.ratio(kind, DEFAULT_STRATEGY, busy)) for busy in model.busy)
        lines.append((kind, *ratios))
    for strategy in (PLAIN, DEFAULT_STRATEGY):
        shares = (shown(mean_kept(model, strategy, busy)) for busy in model.busy)
        lines.append((f"*`{strategy}`, share of idle speed*", *shares))
    return table(head, lines)


def mean_kept(model: Model, strategy: str, busy: int) -> Spread | None:
    """Over the kinds of text: their median."""
    shares = [model.kept(kind, strategy, busy) for kind in model.kinds]
    return Spread.of(share.median for share in shares if share is not None)


def predictions(model: Model) -> list[str]:
    head = ("", *(f"beside {busy}" if busy else "idle" for busy in model.busy))
    found = [model.summary(FORETOLD, PREDICTION, busy) for busy in model.busy]
    return table(
        head,
        [
            ("against `none`", *(shown(model.ratio(FORETOLD, PREDICTION, busy)) for busy in model.busy)),
            ("accepted of proposed", *(number(each.acceptance_rate if each else None) for each in found)),
            ("tokens per step", *(number(each.tokens_per_step if each else None) for each in found)),
        ],
    )


def goals(model: Model) -> list[Goal]:
    """Those that the rows can decide."""
    found = [share_goal(model, busy, least) for busy, least in KEPT.items() if busy in model.busy]
    for busy in filter(None, model.busy):
        ahead = model.ratio(ENGINES, PLAIN, busy, LLAMA)
        words = f"`{PLAIN}` has {shown(ahead)} times llama.cpp's speed beside {busy}; {AHEAD:g} is wanted"
        found.append(Goal(words, ahead.median >= AHEAD if ahead else None))
        found += [kind_goal(model, kind, busy) for kind in model.kinds]
        found.append(prediction_goal(model, busy))
    return found


def share_goal(model: Model, busy: int, least: float) -> Goal:
    kept = model.kept(ENGINES, PLAIN, busy)
    words = f"`{PLAIN}` keeps {shown(kept)} of its idle speed beside {busy}; {least:g} is wanted on two cores"
    return Goal(words, kept.median >= least if kept else None)


def kind_goal(model: Model, kind: str, busy: int) -> Goal:
    """No loss; and where drafting wins on an idle machine, most of that."""
    idle, now = (model.ratio(kind, DEFAULT_STRATEGY, each) for each in (0, busy))
    least = NO_LOSS
    if idle and idle.median >= GAIN:
        least = max(least, GAIN_KEPT * idle.median)
    words = f"`{DEFAULT_STRATEGY}` on {kind} beside {busy}: {shown(now)} times `{PLAIN}`; {least:.2f} is wanted"
    return Goal(words, now.median >= least if now else None)


def prediction_goal(model: Model, busy: int) -> Goal:
    idle, now = (model.summary(FORETOLD, PREDICTION, each) for each in (0, busy))
    before, after = (each.tokens_per_step if each else None for each in (idle, now))
    words = f"right predictions beside {busy}: {number(after)} tokens per step, idle {number(before)}"
    return Goal(words, after >= RIGHT_KEPT * before if after and before else None)


def failures(model: Model) -> list[str]:
    errors = dict.fromkeys((row.cell.strategy, row.error.replace("|", "/")) for row in model.rows if row.error)
    return ["What did not run:", "", *table(("engine or strategy", "why"), errors)] if errors else []


def speed_of(summary: Summary | None) -> str:
    return "-" if summary is None or summary.speed is None else f"{summary.speed.median:.1f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def shown(value: Spread | None) -> str:
    return "-" if value is None else f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"
