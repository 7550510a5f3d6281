"""The Markdown page of a file of results: one section for each part, each with its goal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks.figures import summary
from benchmarks.figures.compare import LEFT_OUT
from benchmarks.figures.results import Row
from benchmarks.figures.summary import Ratio, geometric_ratio, ratio, spread

NONE = "parlay none"
Line = Sequence[str]


def report(header: dict[str, Any], rows: Sequence[Row]) -> str:
    """The page."""
    sections = [
        section(rows)
        for section in (plain, lookup, draft, adversary, overhead, launch, versus)
        if any(row.part == section.__name__ for row in rows)
    ]
    return "\n".join(["# Figures", "", *about(header), *(line for lines in sections for line in lines)])


def about(header: dict[str, Any]) -> list[str]:
    """Where the numbers come from, and how to read them."""
    machine, versions = header["machine"], header["versions"]
    environment = ", ".join(f"{name}={value}" for name, value in header["environment"].items())
    return [
        f"{machine['cpu']}, {machine['cores']} cores ({machine['capability']}), {machine['memory_gib']} GiB, "
        f"{machine['system']}; threads: {header['threads']}{'; ' + environment if environment else ''}. "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". Commit {header['commit']}, {header['date']}, made by `{header['command']}`.",
        "",
        "Speed is decoding speed: tokens after the first emission over the time they took, by one stopwatch for all "
        "systems. A ratio is the median of the rounds with the lowest and the highest round in brackets; within a "
        "round the systems run in turn on the same prompts. *Same* counts texts equal, token for token, to those of "
        "plain decoding by Parlay. *Looped* is the share of the plain text that repeats 16 tokens or more of its own; "
        "unless the section says otherwise only tokens before the first such repeat are measured.",
        "",
    ]


def table(head: Line, lines: Iterable[Line]) -> list[str]:
    """A Markdown table and an empty line."""
    rows = [head, ["---"] * len(head), *lines]
    return [*("| " + " | ".join(row) + " |" for row in rows), ""]


def of(rows: Iterable[Row], part: str) -> list[Row]:
    """The rows of one part."""
    return [row for row in rows if row.part == part]


def models(rows: Iterable[Row]) -> list[str]:
    """The models of these rows, in order."""
    return list(dict.fromkeys(row.model for row in rows))


def plain(rows: Sequence[Row]) -> list[str]:
    """`none` against every combination."""
    lines = ["## Plain decoding against transformers", ""]
    defaults = {row.model: row.note for row in of(rows, "plain-default")}
    for model in models(of(rows, "plain")):
        own = [row for row in of(rows, "plain") if row.model == model]
        cells = [plain_line(own, system, defaults.get(model, "")) for system in summary.systems(own)]
        head = ("system", "tokens/s", f"{NONE} is faster by", "same", "")
        lines += [f"{model}. Goal: at least 1.3 times the best combination, 1.5 times the default. Loops are kept.", ""]
        lines += table(head, sorted(cells, key=lambda cell: -float(cell[1] or 0)))
    return lines


def plain_line(rows: Sequence[Row], system: str, default: str) -> Line:
    """One system's line."""
    own = [row for row in rows if row.system == system]
    errors = [row.error for row in own if row.error]
    if errors:
        return (system, "", "", "", f"failed: {errors[0]}")
    notes = "default" if system == default else note_of(own) if system == NONE else ""
    return (system, f"{summary.rate(own):.1f}", shown(ratio(rows, NONE, system)), summary.same(own), notes)


def lookup(rows: Sequence[Row]) -> list[str]:
    """Prompt lookup on edits and copies."""
    lines = ["## Prompt lookup on edits and copies", "", "Goal: at least 3 times plain decoding.", ""]
    return lines + strategy_tables(of(rows, "lookup"))


def draft(rows: Sequence[Row]) -> list[str]:
    """The draft model on all kinds of text."""
    lines = ["## Draft model on every kind of text", ""]
    lines += ["Goal: `draft-model` at least 1.2 times plain decoding in geometric mean.", ""]
    return lines + strategy_tables(of(rows, "draft"))


def adversary(rows: Sequence[Row]) -> list[str]:
    """Drafters that are wrong on purpose."""
    lines = ["## Drafters that are wrong on purpose", ""]
    lines += [
        "Goal: at least 0.98 of plain decoding. Each request meets a policy that knows nothing. Loops are kept.",
        "",
    ]
    return lines + strategy_tables(of(rows, "adversary"))


def strategy_tables(rows: Sequence[Row]) -> list[str]:
    """For each model and system: a line for each kind of text, and the geometric mean."""
    lines: list[str] = []
    for model in models(rows):
        own = [row for row in rows if row.model == model]
        for system in (name for name in summary.systems(own) if name != NONE):
            cells = [strategy_line(own, system, kind) for kind in summary.kinds(own)]
            mean = shown(geometric_ratio(own, system, NONE))
            cells.append(("**geometric mean**", f"**{mean}**", "", "", "", "", ""))
            head = (
                f"{system} on {model}",
                "speed against none",
                "tokens per step",
                "accepted",
                "same",
                "tokens",
                "looped",
            )
            lines += table(head, cells)
        lines += left_out(own)
    return lines


def left_out(rows: Sequence[Row]) -> list[str]:
    """What was not measured because the text loops at once."""
    blocks = {row.block for row in rows if row.note.startswith(LEFT_OUT) and row.round == 0}
    count = len({row.block for row in rows if row.round == 0})
    return [f"Left out, since their text loops at once: {len(blocks)} of {count} prompts.", ""] if blocks else []


def strategy_line(rows: Sequence[Row], system: str, kind: str) -> Line:
    """One system on one kind of text."""
    pair = [row for row in rows if row.kind == kind]
    own = [row for row in pair if row.system == system]
    errors = [row.error for row in own if row.error]
    if errors:
        return (kind, f"failed: {errors[0]}", "", "", "", "", "")
    drafted = sum(row.draft_tokens for row in own)
    accepted = f"{sum(row.accepted_tokens for row in own) / drafted:.2f}" if drafted else ""
    return (
        kind,
        shown(ratio(pair, system, NONE)),
        f"{summary.tokens_per_step(own):.2f}",
        accepted,
        summary.same(own),
        str(sum(row.tokens for row in own)),
        f"{summary.mean_looped(own):.2f}",
    )


def overhead(rows: Sequence[Row]) -> list[str]:
    """Milliseconds of a step besides its forward."""
    own = of(rows, "overhead")
    parts = ("besides", "besides p90", "propose", "verify", "accept", "commit", "observe", "report", "rest", "tokens")
    lines = ["## A step besides the forward", ""]
    lines += [
        "Milliseconds of the median step against a target that answers at once (`tokens`: committed per step and "
        "sequence; `rest`: scheduling and counting). Goal, without drafts: 0.3 at batch 1 greedy, 2 at batch 32.",
        "",
    ]
    for kind in dict.fromkeys(row.kind for row in own):
        chosen = [row for row in own if row.kind == kind]
        cells = []
        for system in dict.fromkeys(row.system for row in chosen):
            values = [row.values or {} for row in chosen if row.system == system]
            cells.append((*system.split(" | "), *(f"{median(value[part] for value in values):.3f}" for part in parts)))
        lines += [f"Vocabulary {kind}", "", *table(("strategy", "batch", "tokens chosen", *parts), cells)]
    return lines


def launch(rows: Sequence[Row]) -> list[str]:
    """Seconds to the first text."""
    first = spread([row.first_seconds for row in of(rows, "launch")])
    lines = ["## From the command to the first text", ""]
    return [*lines, f"`parlay generate`, warm disk: {shown(first)} s. Goal: within 5 s.", ""]


def versus(rows: Sequence[Row]) -> list[str]:
    """The default strategy against transformers, by workload."""
    lines = ["## The default strategy by workload", ""]
    lines += [
        "Against plain decoding by Parlay, and against the fastest that transformers has for that workload: its best "
        "plain combination, its prompt lookup, or its assisted generation with the draft model. Its texts may differ "
        "in the last place of bf16; its own *same* stands in the last column.",
        "",
    ]
    for model in models(of(rows, "versus")):
        own = [row for row in of(rows, "versus") if row.model == model]
        head = (
            "workload",
            "against plain",
            "against transformers at its best",
            "same text",
            "tokens per step",
            "its best",
        )
        lines += [model, "", *table(head, [versus_line(own, kind) for kind in summary.kinds(own)])]
        lines += [*every_system(own), *left_out(own)]
    return lines


def versus_line(rows: Sequence[Row], kind: str) -> Line:
    """One workload."""
    own = [row for row in rows if row.kind == kind]
    names = summary.systems(own)
    default = next(name for name in names if name.startswith("parlay ") and name != NONE)
    rates = {name: rate_of(own, name) for name in names if name.startswith("transformers")}
    best = max(rates, key=lambda name: rates[name])
    ours, theirs = ([row for row in own if row.system == name] for name in (default, best))
    note = f"{best.removeprefix('transformers ')} ({note_of(theirs)}), same {summary.same(theirs)}"
    return (
        kind,
        shown(ratio(own, default, NONE)),
        shown(ratio(own, default, best)),
        summary.same(ours),
        f"{summary.tokens_per_step(ours):.2f}",
        note,
    )


def every_system(rows: Sequence[Row]) -> list[str]:
    """Tokens per second of every system on every workload."""
    kinds = summary.kinds(rows)
    cells = [
        (system, *(f"{rate_of([row for row in rows if row.kind == kind], system):.1f}" for kind in kinds))
        for system in summary.systems(rows)
    ]
    return table(("tokens/s", *kinds), cells)


def rate_of(rows: Iterable[Row], system: str) -> float:
    """Tokens per second of one system."""
    return summary.rate(row for row in rows if row.system == system)


def note_of(rows: Sequence[Row]) -> str:
    """How the system was run."""
    return next((row.note.removeprefix("transformers ") for row in rows if row.note), "")


def shown(value: Ratio | None) -> str:
    """A ratio, or a dash."""
    return "-" if value is None else str(value)
