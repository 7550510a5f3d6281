"""Writes the Markdown page of `benchmarks.serving.mixed`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.pages import about, failures, number, same, table
from benchmarks.serving.mixed_trace import KINDS
from parlay.bench.records import Row
from parlay.bench.summary import Measurements

CAPACITY = "capacity"
"""The part of the file that states plain decoding's capacity."""
RATE, ALONE, GOODPUT = "talks_per_second", "alone_seconds_per_token", "goodput"
"""Values of rows: conversations that begin per second, seconds per token of plain decoding alone, good answers per
second."""
FIRST_SECONDS, SLOWER = 1.0, 2.0
"""A good answer begins within this many seconds, and takes at most this many times plain decoding's time per token
alone."""
HOW = (
    "Questions are Spec-Bench's, chats are MT-bench's with both turns behind one system message, edits are EditEval's, "
    "calls are BFCL's and held to a JSON schema; a quarter of the talks each. Talks arrive as a Poisson process, the "
    "same for every strategy of a round; the second turn of a chat is asked when the first is answered. *Load* is the "
    "rate of arrivals over that at which plain decoding serves them, found with 16 talks at once. *First* is from the "
    "request to its first piece of text, *per token* the time after it over the tokens after it: p50 / p95 of all "
    "requests, in milliseconds. *Goodput* is answers a second whose first piece came within "
    f"{FIRST_SECONDS:g} s and whose time per token is at most {SLOWER:g} times that of plain decoding alone. *Same* "
    "counts texts equal to those of plain decoding, which decodes greedily, as all do. Clients and server share the "
    "machine. Small models soon repeat themselves, which flatters what copies; no prompt was left out for that."
)


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Write the page: plain decoding's capacity, a table by load and strategy, and a table by kind of request."""
    found = Measurements(rows)
    lines = ["# Mixed traffic", "", about(header), "", HOW, ""]
    for model in found.each(lambda cell: cell.model):
        own = [row for row in rows if row.cell.model == model]
        lines += [f"## {model}", "", *_capacity(own), *_loads(own), *_kinds(own)]
    return "\n".join([*lines, *failures(found)]).rstrip() + "\n"


def _capacity(rows: Sequence[Row]) -> Iterable[str]:
    for row in rows:
        if row.cell.part == CAPACITY:
            alone = 1000 * row.values[ALONE]
            yield (
                f"Plain decoding serves {row.values[RATE]:.2f} talks a second; alone it takes {alone:.1f} ms per "
                f"token. {100 * (row.looped or 0):.0f} % of its tokens repeat 16 or more of their own answer."
            )
            yield ""


def _loads(rows: Sequence[Row]) -> list[str]:
    by_cell = _by_cell(row for row in rows if not row.cell.part and not row.error)
    head = ("load", "strategy", "rounds", "first", "per token", "tokens/s", "goodput", "same")
    lines = [
        (
            load,
            f"`{strategy}`",
            str(len(own)),
            _times([each for row in own for each in row.ttft]),
            _times([each for row in own for each in row.itl]),
            number(sum(row.tokens for row in own) / sum(row.seconds for row in own), 1),
            number(mean(row.values[GOODPUT] for row in own)),
            same(own),
        )
        for (load, strategy), own in by_cell.items()
    ]
    return ["### By load", "", *table(head, lines)] if lines else []


def _kinds(rows: Sequence[Row]) -> list[str]:
    """Write a table of the median time per token of each kind."""
    by_cell = {kind: _by_cell(row for row in rows if row.cell.part == kind) for kind in KINDS}
    places = dict.fromkeys(place for cells in by_cell.values() for place in cells)
    lines = [
        (load, f"`{strategy}`", *(_middle(cells.get((load, strategy), ())) for cells in by_cell.values()))
        for load, strategy in places
    ]
    if not lines:
        return []
    return [
        "### Per token, by kind of request",
        "",
        "p50 in milliseconds.",
        "",
        *table(("load", "strategy", *KINDS), lines),
    ]


def _by_cell(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.cell.workload, row.cell.strategy), []).append(row)
    return dict(sorted(found.items(), key=lambda pair: pair[0][0]))


def _middle(rows: Sequence[Row]) -> str:
    values = [each for row in rows for each in row.itl]
    return number(1000 * percentile(values, 50), 1) if values else "-"


def _times(values: Sequence[float]) -> str:
    return " / ".join(number(1000 * percentile(values, share), 1) for share in (50, 95)) if values else "-"


def percentile(values: Sequence[float], share: int) -> float:
    """Return the percentile by nearest rank: the least value that is at least as large as ``share`` percent of the
    values."""
    return sorted(values)[max(0, -(-len(values) * share // 100) - 1)]
