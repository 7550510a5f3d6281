"""Writes the page of the simulator's validation."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.pages import about, table
from benchmarks.simulation.cases import GOAL, SHOWN
from parlay.bench.records import Results, Row

_TEXTS = {
    "virtual": (
        "## The engine in virtual time",
        "The real engine and scheduler with a runner that only counts; its clock is moved by what steps cost. "
        f"Numbers are how far the simulator is from it. Goal: {GOAL:.1%}. Which drafted tokens are right is drawn at "
        "random, but for each place of an answer only once: both have the same (common random numbers).",
    ),
    "process": (
        "## The engine in process",
        "A model decodes requests that arrive at random, in one thread, whose processor time is the clock: other "
        "programs take no time of it. The simulator has the means of that run's own steps. Goal: 10 %.",
    ),
    "server": (
        "## A server",
        "`parlay serve` with one decoding thread, over HTTP. The clock is the processor time of its process: other "
        "programs take no time of it, and what its threads do at once counts one after the other. The simulator has a "
        "calibration of the machine and what HTTP takes for each token of prompt and answer, both measured "
        "beforehand.",
    ),
}


def report(results: Results) -> str:
    """Write a table for each part."""
    lines = ["# The simulator held against the engine", "", about(results.header), ""]
    if note := results.header.get("note"):
        lines += [note, ""]
    for part, (title, text) in _TEXTS.items():
        own = [row for row in results.rows if row.cell.part == part]
        if own:
            lines += [title, "", text, "", *_differences(own)]
            if part == "server" and all("http" in row.values for row in own):  # older rows lack it
                lines += _causes(own)
    return "\n".join(lines + _fleet([row for row in results.rows if row.cell.part == "fleet"]))


def _differences(rows: Sequence[Row]) -> list[str]:
    busy = any("busy cores" in row.values for row in rows)
    head = ("server", "load", *SHOWN, "largest", *(["busy cores before"] if busy else ["engine s", "simulator s"]))
    return table(head, (_line(row, busy=busy) for row in rows))


def _line(row: Row, *, busy: bool) -> list[str]:
    differences = [row.values[f"difference {name}"] for name in SHOWN]
    cells = [f"{100 * each:+.1f} %" for each in [*differences, max(differences, key=abs)]]
    last = (
        [f"{row.values['busy cores']:g}"]
        if busy
        else [
            f"{row.values['engine seconds']:.1f}",
            f"{row.values['simulator seconds']:.2f}",
        ]
    )
    return [row.cell.model, row.cell.workload.removeprefix("load "), *cells, *last]


def _causes(rows: Sequence[Row]) -> list[str]:
    """Write how a server's CPU seconds divide, and how far the simulator's seconds are above them."""
    names = ("difference of decoding", "difference of http", "http")
    text = "Seconds that the server computed: how far the simulator's are above them, and the share of HTTP."
    cells = [
        [row.cell.workload.removeprefix("load "), *(f"{100 * row.values[each]:+.1f} %" for each in names)]
        for row in rows
    ]
    return [text, "", *table(("load", "decoding", "HTTP", "share of HTTP"), cells)]


def _fleet(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    head = (
        "fleet",
        "requests",
        "simulated s",
        "took s",
        "of it computing s",
        "mean replicas",
        "utilisation",
        "first p90 s",
        "whole p90 s",
        "found cached",
        "deaths",
        "unfinished",
    )
    lines = [
        [
            row.cell.workload,
            f"{row.requests:,}",
            f"{row.seconds:,.0f}",
            f"{row.values['simulator seconds']:.0f}",
            f"{row.values['computed seconds']:.0f}",
            f"{row.values['mean replicas']:.0f}",
            f"{row.values['utilisation']:.0%}",
            f"{row.values['first p90']:.2f}",
            f"{row.values['whole p90']:.1f}",
            f"{row.values['found']:.0%}",
            f"{row.values['deaths']:.0f}",
            f"{row.values['unfinished']:.0f}",
        ]
        for row in rows
    ]
    text = "Up to a thousand replicas and a day of traffic whose rate swings by 60 %. Goal: under five minutes each."
    return ["## Fleets", "", text, "", *table(head, lines)]
