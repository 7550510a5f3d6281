"""Writes the page of a file of rows: the speed of each engine, and Parlay's best strategy against each peer's best
mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from benchmarks.pages import about, failures, number, shown, table
from benchmarks.peers.catalogue import PEERS
from parlay.bench.records import OURS, PLAIN, Cell, Row, System
from parlay.bench.summary import Measurements, Spread, decode_rate, measured, ratio, whole_rate

ALL = "all of them"
TRANSFORMERS = System("transformers", "plain")
BASES: Mapping[str, System] = {"transformers plain": TRANSFORMERS, "parlay none": System(OURS, PLAIN)}
Rate = Callable[[Row], float]


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the page, one model after the other."""
    lines = ["# Parlay and its peers", "", about(header), "", *EXPLANATION, ""]
    for model in dict.fromkeys(row.cell.model for row in rows):
        lines += section(Model(model, [row for row in rows if row.cell.model == model]))
    return "\n".join(lines)


EXPLANATION = (
    "Greedy, batch 1, the same checkpoint, token ids, lengths and threads for all; each engine in a process and an "
    "environment of its own, one stopwatch, rounds interleaved prompt by prompt. No prompt's cache and no earlier "
    "answer is reused by anybody. Texts are cut where plain decoding by Parlay begins to repeat itself. *Decoding* "
    "leaves out the time to the first token, *whole* has it. A ratio is the median of ratios within rounds. *Same* "
    "counts texts equal to those of plain decoding by Parlay; a text that differs has the same length.",
)


@dataclass(frozen=True, slots=True)
class Contest:
    """A comparison: which of Parlay's modes compete with which of the peers' modes, and the goal as a ratio of
    speeds."""

    title: str
    goal: float
    ours: Callable[[str], bool]
    theirs: Callable[[str], bool]
    rate: Rate = decode_rate


def any_mode(mode: str) -> bool:
    return True


def drafts(mode: str) -> bool:
    return mode != PLAIN


CONTESTS = (
    Contest("Parlay's drafts against the fastest mode of each peer, whole requests", 1.0, drafts, any_mode, whole_rate),
    Contest("Parlay's drafts against the fastest mode of each peer, decoding", 1.0, drafts, any_mode),
    Contest(
        "Plain decoding against the fastest plain mode of each peer, decoding",
        1.0,
        lambda mode: mode == PLAIN,
        lambda mode: mode.startswith("plain"),
    ),
)


class Model:
    """The measurements of one model."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        self.name = name
        self.rows = rows
        self.found = Measurements(rows)
        self.systems = self.found.each(lambda cell: cell.system)
        self.workloads = Measurements(measured(rows)).each(lambda cell: cell.workload)
        self.peers = [engine for engine in dict.fromkeys(engine for engine, _ in self.systems) if engine != OURS]

    def of(self, system: System, workload: str) -> Sequence[Row]:
        cell = Cell(engine=system.engine, model=self.name, strategy=system.strategy, workload=workload)
        return self.found.of(cell)

    def ratio(self, system: System, base: System, workload: str, rate: Rate) -> float | None:
        """Return how many times as fast as ``base`` a system is in the median round; None if one of them has no
        number."""
        found = ratio(self.of(system, workload), self.of(base, workload), rate)
        return found.median if found else None

    def mean(self, system: System, base: System, rate: Rate) -> float | None:
        """Return the geometric mean of the ratios over the workloads; None unless there is a number for each."""
        ratios = [self.ratio(system, base, workload, rate) for workload in self.workloads]
        known = [ratio for ratio in ratios if ratio is not None]
        return geometric_mean(known) if known and len(known) == len(ratios) else None

    def best(self, systems: Iterable[System], workload: str, rate: Rate) -> System | None:
        """Return the fastest of these systems; None if none ran."""
        rates = {system: self.rate(system, workload, rate) for system in systems}
        fastest = max(rates, key=lambda system: rates[system], default=None)
        return fastest if fastest and rates[fastest] else None

    def rate(self, system: System, workload: str, rate: Rate = decode_rate) -> float:
        """Return tokens per second in the median round; 0 if there is no round."""
        found = Spread.of(filter(None, map(rate, measured(self.of(system, workload)))))
        return found.median if found else 0.0


def section(model: Model) -> list[str]:
    """Return the section of one model: all systems, then Parlay against each peer, then the systems that did not
    run."""
    lines = [f"## {model.name}", "", f"Rounds: {rounds(model)}. Prompts and tokens per round: {counts(model)}.", ""]
    ran = [system for system in model.systems if any(model.rate(system, each) for each in model.workloads)]
    lines += ["Decoding, tokens per second, and ratios in geometric mean over the workloads.", ""]
    bases = [name for name, base in BASES.items() if base in model.systems]
    ratios = [f"against {base}" for base in bases] + [f"whole requests against {base}" for base in bases[:1]]
    head = ("engine and mode", *model.workloads, *ratios, "same", "")
    lines += table(head, [system_line(model, system, bases) for system in ran])
    lines += left_out(model)
    for strategy in [system.strategy for system in model.systems if system.engine == OURS and drafts(system.strategy)]:
        lines += gains(model, strategy)
    for contest in CONTESTS:
        lines += duel(model, contest)
    return lines + failures(model.found)


def rounds(model: Model) -> str:
    """Say how many rounds there were, and in how many of them the peers were measured."""
    all_of_them = len({row.round for row in model.rows})
    theirs = len({row.round for row in model.rows if row.cell.engine != OURS})
    return f"{all_of_them}, of which {theirs} with the other engines" if 0 < theirs < all_of_them else f"{all_of_them}"


def left_out(model: Model) -> list[str]:
    """List the modes of the peers that were not asked for."""
    peers = (peer for peer in PEERS if peer.engine in model.peers)
    able = [System(peer.engine, mode) for peer in peers for mode in peer.modes if mode not in peer.drafting]
    absent = [" ".join(system) for system in able if system not in model.systems]
    return [f"Modes left out of this run: {', '.join(absent)}.", ""] if absent else []


def system_line(model: Model, system: System, bases: Sequence[str]) -> tuple[str, ...]:
    """Return the table row of a system, with its ratios to ``bases``. Whole requests are compared with the first
    only."""
    own = [row for row in model.rows if row.cell.system == system]
    errors = [row for row in own if row.error]
    note = next((row.note for row in own if row.decode_seconds), "")
    return (
        " ".join(system),
        *(number(model.rate(system, workload) or None, 0) for workload in model.workloads),
        *(number(model.mean(system, BASES[base], decode_rate)) for base in bases),
        *(number(model.mean(system, BASES[base], whole_rate)) for base in bases[:1]),
        f"{sum(row.same for row in own)}/{sum(row.of for row in own)}",
        note + (f"; failed in {len(errors)} of {len(own)} rows" if errors else ""),
    )


def gains(model: Model, strategy: str) -> list[str]:
    """Write a table of one of Parlay's strategies against its plain decoding, by workload."""
    drafting, plain = System(OURS, strategy), System(OURS, PLAIN)
    lines: list[tuple[str, ...]] = []
    for workload in model.workloads:
        own, base = model.of(drafting, workload), model.of(plain, workload)
        steps = sum(row.tokens for row in own) / max(sum(row.steps for row in own), 1)
        lines.append((workload, shown(ratio(own, base)), shown(ratio(own, base, whole_rate)), number(steps)))
    means = [number(model.mean(drafting, plain, rate)) for rate in (decode_rate, whole_rate)]
    lines.append(("**geometric mean**", *(f"**{mean}**" for mean in means), ""))
    head = ("workload", "decoding", "whole requests", "tokens per step")
    title = f"Parlay with `{strategy}`, against its own plain decoding (median round, lowest, highest):"
    return [title, "", *table(head, lines)]


def duel(model: Model, contest: Contest) -> list[str]:
    """Write a table, by workload, of Parlay's fastest mode against each peer's fastest and against the fastest of all
    peers.

    A sentence below says whether the goal is met.
    """
    ours = [system for system in model.systems if system.engine == OURS and contest.ours(system.strategy)]
    fields = {
        peer: [each for each in model.systems if each.engine == peer and contest.theirs(each.strategy)]
        for peer in model.peers
    }
    fields |= {ALL: [system for systems in fields.values() for system in systems]}
    ratios: dict[tuple[str, str], float] = {}
    cells = []
    for workload in model.workloads:
        best = model.best(ours, workload, contest.rate)
        cell = [workload, best.strategy if best else "-"]
        for field, systems in fields.items():
            theirs = model.best(systems, workload, contest.rate)
            value = model.ratio(best, theirs, workload, contest.rate) if best and theirs else None
            if value is None or theirs is None:
                cell.append("-")
                continue
            ratios[field, workload] = value
            cell.append(f"{value:.2f} ({' '.join(theirs) if field == ALL else theirs.strategy})")
        cells.append(tuple(cell))
    means = {field: mean_of(ratios, field) for field in fields}
    cells.append(("**geometric mean**", "", *(f"**{number(mean)}**" for mean in means.values())))
    lines = [f"{contest.title}:", "", *table(("workload", "Parlay", *fields), cells)]
    return [*lines, verdict(ratios, means, contest.goal), ""]


def mean_of(ratios: Mapping[tuple[str, str], float], field: str) -> float | None:
    own = [ratio for (name, _), ratio in ratios.items() if name == field]
    return geometric_mean(own) if own else None


def verdict(ratios: Mapping[tuple[str, str], float], means: Mapping[str, float | None], goal: float) -> str:
    """Return a sentence that says whether the goal is met, and where it is not."""
    short = [f"{field} ({mean:.2f})" for field, mean in means.items() if mean is not None and mean < goal]
    behind = [
        f"{workload} against {field} ({ratio:.2f})"
        for (field, workload), ratio in ratios.items()
        if ratio < 1 and field != ALL
    ]
    return (
        f"Goal: {goal:g} times each in geometric mean, and ahead in each workload. "
        f"Short of it: {', '.join(short) or 'none'}. Behind: {', '.join(behind) or 'nowhere'}."
    )


def counts(model: Model) -> str:
    """Return the numbers of prompts, and of tokens of plain decoding in one round, for each workload."""
    plain = {workload: model.of(System(OURS, PLAIN), workload)[0] for workload in model.workloads}
    return ", ".join(f"{workload} {row.requests} and {row.tokens}" for workload, row in plain.items())
