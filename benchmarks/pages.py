"""Parts of Markdown pages that all benchmarks share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parlay.bench.records import Row
from parlay.bench.report.markdown import Table, markdown
from parlay.bench.summary import Measurements, Spread

HOW = (
    "Speed is decoding speed: tokens after the first emission over the time they took, by one stopwatch for all "
    "systems. A ratio is the median of the rounds with the lowest and the highest round in brackets; within a round "
    "the systems run in turn on the same prompts. *Same* counts texts equal, token for token, to those of plain "
    "decoding by Parlay. *Looped* is the share of the plain text that repeats 16 tokens or more of its own; unless the "
    "section says otherwise only tokens before the first such repeat are measured."
)


def about(header: Mapping[str, Any]) -> str:
    """Return a sentence about the machine, the versions and the command of a run."""
    machine, versions = header["machine"], header["versions"]
    environment = ", ".join(f"{name}={value}" for name, value in header["environment"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({machine['capability']}), {machine['memory_gib']} GiB, "
        f"{machine['system']}; threads: {header['threads']}{'; ' + environment if environment else ''}. "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". Commit {header['commit']}, {header['date']}, made by `{header['command']}`."
    )


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Write a Markdown table and an empty line."""
    return [markdown(Table(tuple(head), tuple(map(tuple, lines)))), ""]


def shown(value: Spread | None, places: int = 2) -> str:
    """Write the median, with the lowest and the highest value in brackets; a dash if there is none."""
    if value is None:
        return "-"
    median, low, high = (f"{each:.{places}f}" for each in (value.median, value.low, value.high))
    return f"{median} ({low}-{high})"


def number(value: float | None, places: int = 2) -> str:
    """Write a number; a dash if there is none."""
    return "-" if value is None else f"{value:.{places}f}"


def same(rows: Iterable[Row]) -> str:
    """Write how many texts equal those of plain decoding, as in 15/16."""
    own = list(rows)
    return f"{sum(row.same for row in own)}/{sum(row.of for row in own)}"


def failures(found: Measurements) -> list[str]:
    """List the systems that did not run, and why; nothing if all did."""
    errors = {(" ".join(row.cell.system), row.error): None for row in found.rows if row.error}
    return ["What did not run:", "", *table(("engine and strategy", "why"), errors)] if errors else []
