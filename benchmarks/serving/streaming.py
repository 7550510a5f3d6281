"""Compares streams of the server with streams of the Python API, one request at a time.

python -m benchmarks.serving.streaming    # results/streaming.jsonl and .md; 4 minutes
python -m benchmarks.serving.streaming --models FILE.gguf
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.pages import about, failures, same, shown, table
from benchmarks.serving import over_api
from benchmarks.serving.over_api import API, CLIENT, STREAMED, WHOLE
from benchmarks.serving.served import served
from benchmarks.setup import FULL, QUICK, SMOLLM2, Setup
from parlay.bench.records import PLAIN, Cell, Results, Row
from parlay.bench.summary import Measurements, ratio, whole_rate
from parlay.llm import LLM
from parlay.strategies.entry import DEFAULT_STRATEGY

GOAL = 0.97
STRATEGIES = (PLAIN, DEFAULT_STRATEGY)
KINDS = ("prose", "copy")
TOKENS, ROUNDS = 256, 9
TOLD = (
    "One request at a time; server and Python API decode the same prompts in turn. Each share is one of tokens per "
    "second, taken within a round: the median round, with the lowest and the highest in brackets. *Decoding* counts "
    f"from the first piece of a text to its last, and the goal is {GOAL:g} there; *request* counts from the request "
    "to the last piece. The client is a process of its own that only reads from a socket. It shares the cores with "
    "the server, so its processor time, the last column, counts against the server.",
)

logger = logging.getLogger("benchmarks")


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the page."""
    found = Measurements(rows)
    lines = ["# Streaming through the server", "", about(header), "", *TOLD, ""]
    for model in found.each(lambda cell: cell.model):
        lines += [f"## {model}", "", *section(found.only(lambda cell, model=model: cell.model == model))]  # type: ignore[misc]
    return "\n".join([*lines, *failures(found)]).rstrip() + "\n"


def section(found: Measurements) -> list[str]:
    """Return the table of one model."""
    head = ("strategy", "", "tokens/s", "decoding", "request", "same text", "client, us a token")
    return table(head, [line(found, cell) for cell in found.cells])


def line(found: Measurements, cell: Cell) -> tuple[str, ...]:
    """Return the row of one way of asking, compared with the Python API."""
    own, base = found.of(cell), found.of(replace(cell, engine=API))
    summary, streamed = found.summary(cell), cell.engine != WHOLE
    tokens = sum(row.tokens for row in own)
    client = 1e6 * sum(row.values.get(CLIENT, 0.0) for row in own) / tokens if tokens else 0.0
    return (
        cell.strategy,
        cell.engine,
        shown(summary.speed, 0) if summary and streamed else "",
        shown(ratio(own, base)) if cell.engine == STREAMED else "",
        shown(ratio(own, base, whole_rate)) if cell.engine != API else "",
        same(own),
        f"{client:.0f}" if client else "",
    )


def measure(results: Results, setup: Setup, model: str, *, tokens: int, rounds: int) -> None:
    """Measure one model: its server, and an LLM in this process that is idle while the server decodes."""
    path = setup.directory(model)
    items = [item for kind in KINDS for item in setup.drawn(kind, 2).items]
    with served(f"{path.name}={path}") as url, LLM(str(path), router_memory="off") as llm:
        for strategy in STRATEGIES:
            logger.info("%s, %s", path.name, strategy)
            cell = Cell(model=path.name, strategy=strategy, workload=" and ".join(KINDS))
            over_api.compare(results, llm, urlsplit(url).netloc, cell, items, tokens=tokens, rounds=rounds)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("serving.streaming", __doc__)
    parser.add_argument("--models", nargs="+", default=[SMOLLM2], metavar="MODEL", help=f"default: {SMOLLM2}")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {ROUNDS}")
    add_run_flags(parser, quick="few short requests: to see that it works")
    return parser.parse_args(arguments)


@one_line_errors("serving.streaming")
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parse(arguments)
    begin(options)
    words = [Path(model).name for model in options.models]
    command = f"python -m benchmarks.serving.streaming --models {' '.join(words)}"
    results = open_results(options, "streaming", command)
    setup = Setup(QUICK if options.quick else FULL, None, options.cache)
    rounds = options.rounds or (2 if options.quick else ROUNDS)
    for model in options.models:
        measure(results, setup, model, tokens=32 if options.quick else TOKENS, rounds=rounds)
    write_page(results.path, page(results.header, results.rows))


if __name__ == "__main__":
    main()
