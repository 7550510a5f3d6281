"""Measures trained draft heads on SmolLM2: speed and tokens per step beside plain decoding and prompt lookup, by kind
of text.

    python -m benchmarks.drafters.trained --data DIR
    python -m benchmarks.drafters.trained --data DIR --models smollm2-135m --temperatures 0 --prompts 1

With ``--data`` the texts are the 13 kinds of Spec-Bench. Strategies use their default drafts. A second run continues
the file of results, so models and temperatures can be measured one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.pages import HOW, about
from benchmarks.setup import FULL, KINDS, QUICK, SMOLLM2, SMOLLM2_BF16, Setup
from benchmarks.strategies.report import speed_table
from parlay.bench import workloads
from parlay.bench.records import PLAIN, Row
from parlay.bench.runner import Bench, BenchPlan, lacks
from parlay.bench.summary import Measurements
from parlay.bench.workloads import Workload

STRATEGIES = (
    "prompt-lookup",
    "eagle3",
    "medusa",
    "union:of=prompt-lookup+eagle3",
    "auto:of=prompt-lookup+eagle3",
)
TEMPERATURES = (0.0, 0.8)
SPEC_BENCH = "spec-bench"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("drafters.trained", __doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--models", nargs="+", choices=(SMOLLM2, SMOLLM2_BF16), default=[SMOLLM2, SMOLLM2_BF16])
    parser.add_argument("--strategies", nargs="+", metavar="SPEC", default=list(STRATEGIES))
    parser.add_argument("--temperatures", nargs="+", type=float, metavar="X", default=list(TEMPERATURES))
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", default=[SPEC_BENCH], help="as in parlay bench (default: spec-bench)"
    )
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each kind of text (default: 3)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer in tokens (default: 64)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds over all prompts (default: 1)")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and write the page."""
    options = parse()
    begin(options)
    with one_line_errors("drafters.trained"):
        command = f"python -m benchmarks.drafters.trained{' --data DIR' if options.data else ''}"
        results = open_results(options, "trained", command)
        setup = Setup(QUICK if options.quick else FULL, options.data, options.cache)
        for model in options.models:
            plan = plan_of(model, texts(model, setup, options.workloads, options.prompts), options)
            if lacks(results, plan):
                with setup.llm(model) as llm:
                    Bench(llm, plan, results).run()
    write_page(results.path, page(results.header, results.rows))


def texts(model: str, setup: Setup, names: Sequence[str], prompts: int) -> tuple[Workload, ...]:
    """Load ``prompts`` prompts of each workload named. Without ``--data``, load the built-in kinds of text instead."""
    if setup.data is None:
        drawn = setup.workloads(model, tuple(KINDS))
        return tuple(replace(each, items=each.items[:prompts]) for each in drawn)
    loaded = workloads.load(names, 1 if setup.scale is QUICK else prompts, setup.data)
    return tuple(replace(each, name=each.name.removeprefix(f"{SPEC_BENCH}/")) for each in loaded)


def plan_of(model: str, texts: tuple[Workload, ...], options: argparse.Namespace) -> BenchPlan:
    """Plan the measurement of one model."""
    return BenchPlan(
        model=model,
        strategies=tuple(options.strategies),
        workloads=texts,
        temperatures=tuple(options.temperatures),
        rounds=options.rounds,
        max_tokens=min(options.tokens, QUICK.tokens) if options.quick else options.tokens,
    )


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the page in Markdown, with a table for each model and temperature."""
    intro = (
        "Speed as a multiple of plain decoding, with tokens per step in brackets. All strategies use their default "
        "drafts."
    )
    return "\n".join(["# Trained drafters", "", about(header), "", HOW, "", intro, "", *tables(Measurements(rows))])


def tables(found: Measurements) -> Iterator[str]:
    """Yield the lines of a table for each model and temperature."""
    for model in found.each(lambda cell: cell.model):
        for temperature in sorted({cell.temperature for cell in found.cells if cell.model == model}):
            own = [row for row in found.rows if (row.cell.model, row.cell.temperature) == (model, temperature)]
            how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            yield from (f"## {model}, {how}", "", asked(own), "", *speed_table(Measurements(own)))


def asked(rows: Sequence[Row]) -> str:
    """Return a sentence with the numbers of requests, tokens and rounds."""
    plain = [row for row in rows if row.cell.strategy == PLAIN]
    rounds = max((row.round for row in plain), default=-1) + 1
    first = [row for row in plain if row.round == 0]
    return f"Requests {sum(row.requests for row in first)}, tokens {sum(row.tokens for row in first)}, rounds {rounds}."


if __name__ == "__main__":
    main()
