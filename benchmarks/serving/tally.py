"""Counts the results of a soak, summarises them, and writes the report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GROWTH = 0.02
"""The greatest share by which resident memory may grow."""
TELLING = 1000
"""With fewer requests than this, memory is not judged, because caches are still filling."""


@dataclass(slots=True)
class Tally:
    """Counts of the requests' ends. ``wrong`` holds a line for each broken promise."""

    fates: Counter[str] = field(default_factory=Counter)
    strategies: Counter[str] = field(default_factory=Counter)
    exact: int = 0
    inexact: int = 0
    tokens: int = 0
    done: int = 0
    checks: int = 0
    memory: dict[int, int] = field(default_factory=dict)
    """Resident memory in bytes, by the number of requests that were done."""
    wrong: list[str] = field(default_factory=list)


def growth(memory: dict[int, int]) -> float | None:
    """Return the share by which memory grew, from its least in the second quarter to the end; None for too few
    requests."""
    last = max(memory)
    early = [held for done, held in memory.items() if last / 4 <= done <= last / 2]
    return memory[last] / min(early) - 1 if early and last >= TELLING else None


def summary(tally: Tally, planned: Counter[str], seconds: float) -> dict[str, Any]:
    grown = growth(tally.memory)
    wrong = list(tally.wrong)
    if tally.fates.total() != planned.total() or tally.fates["lost"]:
        wrong.append(f"{planned.total()} requests were sent, but these became of them: {dict(tally.fates)}")
    if grown is not None and grown > GROWTH:
        wrong.append(f"resident memory grew by {grown:.1%}")
    return {
        "passed": not wrong,
        "requests": planned.total(),
        "planned": dict(planned),
        "fates": dict(tally.fates),
        "samples_equal_to_plain": tally.exact - sum("differs" in line for line in wrong),
        "samples_exact": tally.exact,
        "samples_not_exact": tally.inexact,
        "tokens": tally.tokens,
        "seconds": round(seconds, 1),
        "checks": tally.checks,
        "resident_mib": {done: round(held / 2**20, 1) for done, held in tally.memory.items()},
        "growth": grown,
        "samples_by_strategy": dict(tally.strategies),
        "wrong": wrong,
    }


def report(title: str, result: dict[str, Any], more: Mapping[str, str]) -> str:
    """Write the report. ``more`` are further rows of its table."""
    fates = ", ".join(f"{count} {fate}" for fate, count in result["fates"].items())
    grown = "too few requests to tell" if result["growth"] is None else f"{result['growth']:+.2%}"
    lines = [
        f"# {title}",
        "",
        f"{'Passed' if result['passed'] else 'FAILED'}: {result['requests']} requests, {fates}, in "
        f"{result['seconds']:.0f} s.",
        "",
        "| promise | found |",
        "|---|---|",
        f"| exact samples equal to plain decoding | {result['samples_equal_to_plain']} of {result['samples_exact']} |",
        f"| samples that promise less, not compared | {result['samples_not_exact']} |",
        f"| drafters that failed | {result['drafter_faults']} |",
        f"| resident memory, least in the second quarter to end | {grown} |",
        *(f"| {name} | {found} |" for name, found in more.items()),
        "",
        *(f"- {line}" for line in result["wrong"]),
        "",
        f"`{json.dumps(result['provenance'])}`",
    ]
    return "\n".join(lines) + "\n"
