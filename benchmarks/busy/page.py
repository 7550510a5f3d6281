"""The page of a file of rows: what each engine keeps of its idle speed, what drafting still wins, and the goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.busy.plans import EDIT, ENGINES, FORETOLD, KINDS, PEER_MODE, PREDICTION, PROSE
from benchmarks.pages import about, failures, number, shown, table
from parlay.bench.records import OURS, PLAIN, Cell, Row, System
from parlay.bench.summary import Measurements, Spread, plain_of
from parlay.strategies.entry import DEFAULT_STRATEGY

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
    """The measurements of one model."""

    def __init__(self, name: str, found: Measurements) -> None:
        self.name = name
        self.found = found.only(lambda cell: cell.model == name)
        self.loads = sorted(self.found.each(lambda cell: cell.busy))
        self.kinds = self.found.only(lambda cell: cell.part == KINDS).each(lambda cell: cell.workload)
        self.engines = self.found.only(lambda cell: cell.part == ENGINES).each(lambda cell: cell.system)

    def prose(self, system: System, busy: int) -> Cell:
        """Plain decoding of prose by one engine."""
        return Cell(
            part=ENGINES, engine=system.engine, model=self.name, strategy=system.strategy, workload=PROSE, busy=busy
        )

    def text(self, kind: str, strategy: str, busy: int) -> Cell:
        """A kind of text by one of Parlay's strategies."""
        return Cell(part=KINDS, model=self.name, strategy=strategy, workload=kind, busy=busy)

    def foretold(self, strategy: str, busy: int) -> Cell:
        """An edit whose prediction is right."""
        return Cell(part=FORETOLD, model=self.name, strategy=strategy, workload=EDIT, busy=busy)

    def kept(self, cell: Cell) -> Spread | None:
        """Speed over that on an idle machine, round by round."""
        return self.found.ratio(cell, replace(cell, busy=0))

    def gain(self, cell: Cell) -> Spread | None:
        """Speed over that of plain decoding beside as many busy processes, round by round."""
        return self.found.ratio(cell, plain_of(cell))


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Everything, one model after the other."""
    found = Measurements(rows)
    lines = ["# Beside busy processes", "", about(header), "", *EXPLANATION, ""]
    for name in found.each(lambda cell: cell.model):
        lines += section(Model(name, found))
    return "\n".join(lines)


def section(model: Model) -> list[str]:
    """One model."""
    rounds = max(row.round for row in model.found.rows) + 1
    lines = [f"## {model.name}", "", f"Rounds: {rounds}.", ""]
    lines += [f"{VERDICTS[goal.met]}: {goal.words}  " for goal in goals(model)]
    lines += ["", "Plain decoding of prose by each engine: tokens per second, and the share of its own idle speed.", ""]
    lines += engines(model)
    lines += [f"`{DEFAULT_STRATEGY}` against `{PLAIN}`, by kind of text:", "", *by_kind(model)]
    lines += ["A prediction that is right in every letter:", "", *predictions(model)]
    return lines + failures(model.found)


def heads(model: Model) -> list[str]:
    return [f"beside {busy}" if busy else "idle" for busy in model.loads]


def engines(model: Model) -> list[str]:
    lines = []
    for system in model.engines:
        cells = [model.prose(system, busy) for busy in model.loads]
        speeds = [shown(each.speed if (each := model.found.summary(cell)) else None, 1) for cell in cells]
        shares = [f" *{shown(model.kept(cell))}*" if cell.busy else "" for cell in cells]
        lines.append((f"{system.engine} {system.strategy}", *map(str.__add__, speeds, shares)))
    return table(("engine", *heads(model)), lines)


def by_kind(model: Model) -> list[str]:
    lines = [
        (kind, *(shown(model.gain(model.text(kind, DEFAULT_STRATEGY, busy))) for busy in model.loads))
        for kind in model.kinds
    ]
    return table(("text", *heads(model)), lines)


def predictions(model: Model) -> list[str]:
    cells = [model.foretold(PREDICTION, busy) for busy in model.loads]
    found = [model.found.summary(cell) for cell in cells]
    lines = [
        (f"against `{PLAIN}`", *(shown(model.gain(cell)) for cell in cells)),
        ("accepted of proposed", *(number(each.acceptance_rate if each else None) for each in found)),
        ("tokens per step", *(number(each.tokens_per_step if each else None) for each in found)),
    ]
    return table(("", *heads(model)), lines)


def goals(model: Model) -> list[Goal]:
    """Those of the loads that were measured."""
    ours, llama = System(OURS, PLAIN), System(LLAMA, PEER_MODE)
    found = [share_goal(model, busy, least) for busy, least in KEPT.items() if busy in model.loads]
    for busy in filter(None, model.loads):
        if llama in model.engines:
            ahead = model.found.ratio(model.prose(ours, busy), model.prose(llama, busy))
            found.append(goal(f"`{PLAIN}` over llama.cpp beside {busy}", ahead, AHEAD))
        found += [kind_goal(model, kind, busy) for kind in model.kinds]
        found.append(prediction_goal(model, busy))
    return found


def goal(what: str, value: Spread | None, least: float) -> Goal:
    words = f"{what}: {shown(value)}, wanted {least:.2f}"
    return Goal(words, value.median >= least if value else None)


def share_goal(model: Model, busy: int, least: float) -> Goal:
    share = model.kept(model.prose(System(OURS, PLAIN), busy))
    return goal(f"share of its idle speed that `{PLAIN}` keeps beside {busy}, on two cores", share, least)


def kind_goal(model: Model, kind: str, busy: int) -> Goal:
    """No loss; and where drafting wins on an idle machine, most of that."""
    idle, now = (model.gain(model.text(kind, DEFAULT_STRATEGY, each)) for each in (0, busy))
    wins = idle is not None and idle.median >= GAIN
    least = max(NO_LOSS, GAIN_KEPT * idle.median) if idle is not None and wins else NO_LOSS
    return goal(f"`{DEFAULT_STRATEGY}` over `{PLAIN}` on {kind} beside {busy}", now, least)


def prediction_goal(model: Model, busy: int) -> Goal:
    idle, now = (model.found.summary(model.foretold(PREDICTION, each)) for each in (0, busy))
    before, after = (each.tokens_per_step if each else None for each in (idle, now))
    words = f"tokens per step of right predictions beside {busy}: {number(after)}, idle {number(before)}"
    return Goal(words, after >= RIGHT_KEPT * before if after and before else None)
