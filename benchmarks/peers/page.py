"""The page of a file of rows: who is how fast on what, and where Parlay's best strategy is ahead of a peer's best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.figures.compare import LEFT_OUT
from benchmarks.figures.report import about, table
from benchmarks.figures.summary import geometric
from benchmarks.peers.catalogue import OURS
from parlay.bench.records import PLAIN, Row
from parlay.llm import DEFAULT_STRATEGY

ALL = "all of them"
Name = tuple[str, str]
"""Engine and mode."""
BASES: Mapping[str, Name] = {"transformers plain": ("transformers", "plain"), "parlay none": (OURS, PLAIN)}
Speed = Callable[[Row], float]


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Everything, one model after the other."""
    lines = ["# Parlay and its peers", "", about(dict(header))[0], "", *EXPLANATION, ""]
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
    """Which of our modes are held against which of theirs, and how many times as fast ours should be."""

    title: str
    goal: float
    ours: Callable[[str], bool]
    theirs: Callable[[str], bool]


def any_mode(mode: str) -> bool:
    return True


CONTESTS = (
    Contest("Parlay's fastest strategy against the fastest mode of each peer", 1.5, any_mode, any_mode),
    Contest(
        f"Parlay's default, `{DEFAULT_STRATEGY}`, against the fastest mode of each peer",
        1.5,
        lambda mode: mode == DEFAULT_STRATEGY,
        any_mode,
    ),
    Contest(
        "Plain decoding against the fastest plain mode of each peer",
        1.0,
        lambda mode: mode == PLAIN,
        lambda mode: mode.startswith("plain"),
    ),
)


@dataclass(frozen=True, slots=True)
class Model:
    """The rows of one model."""

    name: str
    rows: Sequence[Row]

    @property
    def workloads(self) -> list[str]:
        """Those in which something was timed, in order."""
        return list(dict.fromkeys(row.cell.workload for row in self.rows if row.decode_seconds))

    @property
    def names(self) -> list[Name]:
        return list(dict.fromkeys(name_of(row) for row in self.rows))

    @property
    def peers(self) -> list[str]:
        """Engines but Parlay."""
        return [engine for engine in dict.fromkeys(engine for engine, _ in self.names) if engine != OURS]

    def of(self, name: Name, workload: str | None = None) -> list[Row]:
        return [row for row in self.rows if name_of(row) == name and workload in (None, row.cell.workload)]

    def ratio(self, name: Name, base: Name, workload: str, speed: Speed) -> float | None:
        """How many times as fast as ``base``, in the median round; None where one of them has no number."""
        bases = {row.round: speed(row) for row in self.of(base, workload)}
        found = [
            speed(row) / bases[row.round] for row in self.of(name, workload) if bases.get(row.round) and speed(row)
        ]
        return median(found) if found else None

    def mean(self, name: Name, base: Name, speed: Speed) -> float | None:
        """Geometric mean over the workloads; None unless there is a number for each."""
        ratios = [self.ratio(name, base, workload, speed) for workload in self.workloads]
        known = [ratio for ratio in ratios if ratio is not None]
        return geometric(known) if known and len(known) == len(ratios) else None

    def best(self, names: Iterable[Name], workload: str) -> Name | None:
        """The fastest of these there; None when none ran."""
        rates = {name: self.rate(name, workload) for name in names}
        fastest = max(rates, key=lambda name: rates[name], default=None)
        return fastest if fastest and rates[fastest] else None

    def rate(self, name: Name, workload: str) -> float:
        """Decoded tokens per second in the median round; 0 without one."""
        rates = [decoding(row) for row in self.of(name, workload) if decoding(row)]
        return median(rates) if rates else 0.0


def name_of(row: Row) -> Name:
    return row.cell.engine, row.cell.strategy


def decoding(row: Row) -> float:
    """Tokens per second after the first."""
    return row.tokens_per_second


def whole(row: Row) -> float:
    """Tokens per second with the time to the first."""
    return row.tokens / row.seconds if row.seconds else 0.0


def section(model: Model) -> list[str]:
    """One model: all entrants, then Parlay against each peer, then what did not run."""
    rounds = len({row.round for row in model.rows})
    lines = [f"## {model.name}", "", f"Rounds: {rounds}. Prompts and tokens per round: {counts(model)}.", ""]
    ran = [name for name in model.names if any(row.decode_seconds for row in model.of(name))]
    lines += ["Decoding, tokens per second, and ratios in geometric mean over the workloads.", ""]
    head = ("engine and mode", *model.workloads, *(f"against {base}" for base in BASES), "whole time", "same", "")
    lines += table(head, [entrant_line(model, name) for name in ran])
    lines += ["*Whole time*: whole requests, prompt included, against transformers plain.", ""]
    for contest in CONTESTS:
        lines += duel(model, contest)
    return lines + failures(model)


def entrant_line(model: Model, name: Name) -> tuple[str, ...]:
    own = model.of(name)
    errors = [row for row in own if row.error]
    note = next((row.note for row in own if row.decode_seconds), "").partition(f"; {LEFT_OUT}")[0]
    return (
        " ".join(name),
        *(shown(model.rate(name, workload) or None, 0) for workload in model.workloads),
        *(shown(model.mean(name, base, decoding)) for base in BASES.values()),
        shown(model.mean(name, BASES["transformers plain"], whole)),
        f"{sum(row.same for row in own)}/{sum(row.of for row in own)}",
        note + (f"; failed in {len(errors)} of {len(own)} rows" if errors else ""),
    )


def duel(model: Model, contest: Contest) -> list[str]:
    """The fastest of ours against the fastest of each peer and of all peers, per workload; then what that says."""
    fields = {peer: [name for name in model.names if name[0] == peer] for peer in model.peers}
    fields |= {ALL: [name for names in fields.values() for name in names]}
    ratios: dict[tuple[str, str], float] = {}
    cells = []
    for workload in model.workloads:
        ours = model.best([name for name in model.names if name[0] == OURS and contest.ours(name[1])], workload)
        cell = [workload, ours[1] if ours else "-"]
        for field, names in fields.items():
            theirs = model.best([name for name in names if contest.theirs(name[1])], workload)
            ratio = model.ratio(ours, theirs, workload, decoding) if ours and theirs else None
            if ratio is not None:
                ratios[field, workload] = ratio
            cell.append(f"{ratio:.2f} ({' '.join(theirs[field != ALL :])})" if ratio is not None and theirs else "-")
        cells.append(tuple(cell))
    means = {field: mean_of(ratios, field) for field in fields}
    cells.append(("**geometric mean**", "", *(f"**{shown(mean)}**" for mean in means.values())))
    lines = [f"{contest.title}, decoding:", "", *table(("workload", "Parlay", *fields), cells)]
    return [*lines, verdict(ratios, means, contest.goal), ""]


def mean_of(ratios: Mapping[tuple[str, str], float], field: str) -> float | None:
    own = [ratio for (name, _), ratio in ratios.items() if name == field]
    return geometric(own) if own else None


def verdict(ratios: Mapping[tuple[str, str], float], means: Mapping[str, float | None], goal: float) -> str:
    """Whether the goal is met, and where it is not."""
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
    """What each workload consists of: prompts and tokens of plain decoding in one round."""
    plain = {row.cell.workload: row for row in model.of((OURS, PLAIN))}
    return ", ".join(f"{workload} {row.requests} and {row.tokens}" for workload, row in plain.items())


def failures(model: Model) -> list[str]:
    """The modes that failed somewhere, and why."""
    errors: dict[Name, str] = {name_of(row): row.error for row in model.rows if row.error}
    if not errors:
        return []
    lines = ["What did not run:", ""]
    return lines + table(("engine and mode", "why"), [(" ".join(name), clean(why)) for name, why in errors.items()])


def clean(text: str) -> str:
    """A sentence that breaks no table."""
    return text.replace("|", "/")


def shown(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:.{places}f}"
