"""The Markdown page of `benchmarks.serving.load`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.figures import summary
from benchmarks.figures.report import about, models, table
from benchmarks.figures.results import Row
from benchmarks.serving.over_api import API, PART, STREAMED, WHOLE

LOAD, EDITOR = "load", "editor"
PLAIN = "none"
GOAL = 0.95

HOW = (
    "`vllm bench serve` sends prompts of random tokens and has end-of-text ignored. Such prompts are no text, and what "
    "follows them soon repeats itself, so speed-ups here say nothing about real text: these tables are about the "
    "server. Prompts are the same for each strategy and never met in its cache. *Chunks* are the times between two "
    "chunks of a stream, each of which may hold several tokens; *per token* is the time after the first chunk over "
    "the tokens after the first. Times in milliseconds, each as p50 / p99. Generator and server share the machine."
)


def page(header: dict[str, Any], rows: Sequence[Row]) -> str:
    """The page."""
    lines = ["# The server under load", "", about(header)[0], "", HOW, ""]
    for model in models(rows):
        own = [row for row in rows if row.model == model]
        lines += [f"## {model}", "", *_loads(own), *_editor(own), *_over_api(own)]
    return "\n".join(lines).rstrip() + "\n"


def _loads(rows: Sequence[Row]) -> list[str]:
    head = ("strategy", "at once", "requests", "tokens/s", "first token", "chunks", "per token")
    lines = [
        [
            row.kind,
            str(row.prompt),
            _count(row),
            f"{row.rate:.1f}",
            *(_times(row, at) for at in ("ttft", "itl", "tpot")),
        ]
        for row in rows
        if row.part == LOAD
    ]
    return ["### Requests at once", "", *table(head, lines)] if lines else []


def _editor(rows: Sequence[Row]) -> list[str]:
    head = ("strategy", "requests", "first token", "whole answer")
    lines = [[row.kind, _count(row), _times(row, "ttft"), _times(row, "e2el")] for row in rows if row.part == EDITOR]
    if not lines:
        return []
    return ["### Completion in an editor", "", "500 tokens in, 20 out, one request at a time.", "", *table(head, lines)]


def _over_api(rows: Sequence[Row]) -> list[str]:
    lines = list(_over_api_lines([row for row in rows if row.part == PART]))
    if not lines:
        return []
    told = (
        "One request at a time. Tokens per second of whole requests, as a share of those of `LLM.generate`; goal: "
        f"more than {GOAL:g}. Median round, lowest and highest in brackets."
    )
    return ["### Over the Python API", "", told, "", *table(("strategy", "", "share", "same text"), lines)]


def _over_api_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    for strategy in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == strategy]
        for system in (STREAMED, WHOLE):
            same = summary.same(row for row in own if row.system == system)
            yield [strategy, system, str(summary.ratio(own, system, API)), same]


def _count(row: Row) -> str:
    assert row.values is not None
    return f"{row.values['requests']:.0f}"


def _times(row: Row, measure: str) -> str:
    assert row.values is not None
    return " / ".join(f"{row.values[f'{measure}_p{at}_ms']:.1f}" for at in (50, 99))
