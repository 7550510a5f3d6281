"""Writes the Markdown page of `benchmarks.serving.load`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages import about, table
from parlay.bench.records import Row
from parlay.bench.summary import Measurements

LOAD, EDITOR = "load", "editor"

HOW = (
    "`vllm bench serve` sends prompts of random tokens and has end-of-text ignored. Such prompts are no text, and what "
    "follows them soon repeats itself, so speed-ups here say nothing about real text: these tables are about the "
    "server. Prompts are the same for each strategy and never met in its cache. *Chunks* are the times between two "
    "chunks of a stream, each of which may hold several tokens; *per token* is the time after the first chunk over "
    "the tokens after the first. Times in milliseconds, each as p50 / p99. Generator and server share the machine."
)


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the page."""
    lines = ["# The server under load", "", about(header), "", HOW, ""]
    found = Measurements(rows)
    for model in found.each(lambda cell: cell.model):
        own = [row for row in rows if row.cell.model == model]
        lines += [f"## {model}", "", *_loads(own), *_editor(own)]
    return "\n".join(lines).rstrip() + "\n"


def _loads(rows: Sequence[Row]) -> list[str]:
    head = ("strategy", "at once", "requests", "tokens/s", "first token", "chunks", "per token")
    lines = [
        (
            row.cell.strategy,
            str(row.cell.concurrency),
            str(row.requests),
            f"{row.tokens_per_second:.1f}",
            *(_times(row, at) for at in ("ttft", "itl", "tpot")),
        )
        for row in rows
        if row.cell.part == LOAD
    ]
    return ["### Requests at once", "", *table(head, lines)] if lines else []


def _editor(rows: Sequence[Row]) -> list[str]:
    head = ("strategy", "requests", "first token", "whole answer")
    own = [row for row in rows if row.cell.part == EDITOR]
    lines = [(row.cell.strategy, str(row.requests), _times(row, "ttft"), _times(row, "e2el")) for row in own]
    if not lines:
        return []
    return ["### Completion in an editor", "", "500 tokens in, 20 out, one request at a time.", "", *table(head, lines)]


def _times(row: Row, measure: str) -> str:
    return " / ".join(f"{row.values[f'{measure}_p{at}_ms']:.1f}" for at in (50, 99))
