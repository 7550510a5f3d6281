"""Measures predicted outputs on edits: the prediction is the text before the edit. Ratios are to plain decoding.

The same edits are asked for with their predictions and without, where only the prompt can be copied from. Strategies
run interleaved, only tokens before a loop count, and every text is compared with that of plain decoding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.pages import HOW, about, number, shown, table
from benchmarks.setup import FULL, QUICK, SMOLLM2, Setup
from parlay.bench.prepare import lasting
from parlay.bench.records import PLAIN, Results
from parlay.bench.runner import Bench, BenchPlan
from parlay.bench.summary import Measurements
from parlay.drafters.copying import prediction, prompt_lookup
from parlay.strategies.entry import DEFAULT_STRATEGY

KIND, BARE = "edit", "edit without its prediction"
ARMS = {KIND: (DEFAULT_STRATEGY, prediction.SOURCE), BARE: (DEFAULT_STRATEGY, prompt_lookup.SOURCE)}
"""The strategies that each form of the requests is measured with, beside plain decoding."""
TOKENS = 150
GOAL = 4.0


def measure(setup: Setup, results: Results, model: str, count: int) -> None:
    """Measure all strategies on one model, with the predictions and without."""
    with setup.llm(model) as llm:
        edits = lasting(llm, setup.drawn(KIND, 8 * count), count, TOKENS)
        bare = replace(edits, name=BARE, items=tuple([replace(item, prediction=None) for item in edits.items]))
        for workload in (edits, bare):
            plan = BenchPlan(
                model=model,
                strategies=ARMS[workload.name],
                workloads=(workload,),
                rounds=setup.scale.rounds,
                max_tokens=TOKENS,
            )
            Bench(llm, plan, results).run()


def report(results: Results) -> str:
    """Write the page, with a row for each model and strategy."""
    lines = ["# Predicted outputs on edits", "", about(results.header), "", HOW, ""]
    lines += [
        f"The prediction is the text before the edit, which the prompt holds too. Goal: {GOAL:g} times plain decoding.",
        "",
    ]
    found = Measurements(results.rows)
    head = ("model", "requests", "strategy", f"times `{PLAIN}`", "tokens per step", "same", "looped")
    summaries = [each for cell in found.cells if (each := found.summary(cell)) and cell.strategy != PLAIN]
    return "\n".join(
        lines
        + table(
            head,
            (
                (
                    each.cell.model,
                    "without predictions" if each.cell.workload == BARE else "with predictions",
                    f"`{each.cell.strategy}`",
                    shown(each.ratio),
                    number(each.tokens_per_step, 1),
                    "/".join(map(str, each.same or ())),
                    number(each.looped),
                )
                for each in summaries
            ),
        )
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("serving.prediction", __doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--models", nargs="+", default=[SMOLLM2], metavar="MODEL", help=f"default: {SMOLLM2}")
    parser.add_argument("--count", type=int, default=FULL.prompts, help="prompts (default: 8)")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and write the page."""
    options = parse()
    begin(options)
    setup = Setup(QUICK if options.quick else FULL, options.data, options.cache)
    command = f"python -m benchmarks.serving.prediction{' --data DIR' if options.data else ''}"
    with one_line_errors("serving.prediction"):
        results = open_results(options, "prediction", command)
        for model in options.models:
            measure(setup, results, model, QUICK.prompts if options.quick else options.count)
    write_page(results.path, report(results))


if __name__ == "__main__":
    main()
