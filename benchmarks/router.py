"""Measures `auto` against static strategies, by model, kind of text, concurrency, temperature and context.

One run has no time for all cells. Their order is such that the first cells, however many, hold each value of each
dimension about equally often. So ``--minutes`` may end a run anywhere; the next run continues the same file. Strategies
run interleaved, only tokens before a loop count, and every text is compared with that of plain decoding.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.commands import begin, one_line_errors, open_results, results_path, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.router_cells import Setting, left_over, settings, spread
from benchmarks.router_page import AUTO, report
from benchmarks.setup import FULL, MINI, SMOLLM2, SMOLLM2_BF16, Setup
from parlay.bench import records, workloads
from parlay.bench.prepare import lasting
from parlay.bench.records import Cell, Results
from parlay.bench.runner import Bench, BenchPlan
from parlay.heads.store import SHIPPED
from parlay.models.loading import weight_files

MODELS = (SMOLLM2, SMOLLM2_BF16, MINI)
STATIC = (
    "prompt-lookup",
    "suffix-decoding",
    "eagle3",
    "union:of=prompt-lookup+eagle3",
    "token-recycling",
)
"""The strategies with which `auto` is compared, in addition to plain decoding."""
PUBLISHED = ("editeval", "bfcl-simple", "spec-bench")
"""The sets of prompts that are measured with ``--data``; Spec-Bench has 13 kinds of text."""

TRIED = 2
"""The number of prompts tried for each one wanted, because some texts loop at once. A trial takes as long as a
measurement."""


class Measurement:
    """Measures settings of several models. A model is loaded, and its prompts are chosen, at its first setting."""

    def __init__(self, plans: Sequence[BenchPlan], setup: Setup, results: Results) -> None:
        self._plans = {plan.model: plan for plan in plans}
        self._setup, self._results = setup, results
        self._benches: dict[str, Bench] = {}

    def run(self, order: Sequence[Setting], ends: float) -> None:
        """Measure the settings that lack a round, until ``ends`` (of `time.monotonic`). Each round is written at
        once."""
        rounds = max(plan.rounds for plan in self._plans.values())
        with ExitStack() as stack:
            for model, setting in left_over(order, rounds, self._rounds_of):
                if time.monotonic() >= ends:
                    return
                if model not in self._benches:
                    self._benches[model] = self._open(model, stack)
                self._benches[model].run_setting(setting)

    def _rounds_of(self, setting: Setting) -> int:
        model, conditions = setting
        return len(self._results.of(Cell(model=model, strategy=AUTO, **conditions._asdict())))

    def _open(self, model: str, stack: ExitStack) -> Bench:
        llm, plan, scale = stack.enter_context(self._setup.llm(model)), self._plans[model], self._setup.scale
        chosen = tuple(lasting(llm, drawn, scale.prompts, scale.tokens) for drawn in plan.workloads)
        return Bench(llm, replace(plan, workloads=chosen), self._results)


def head() -> str:
    """Return the first twelve digits of the hash of the trained head that ships for SmolLM2."""
    files = weight_files(SHIPPED / "eagle3" / SMOLLM2)
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("router", __doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="begin no cell after this time (default: no limit)"
    )
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page of the existing rows")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--strategies", nargs="+", default=list(STATIC), metavar="SPEC", help="to compare `auto` with")
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", help="as in parlay bench (default: all kinds of text)"
    )
    numbers = {"concurrency": (1, 4, 16, 64), "context": (512, 4096)}
    for name, values in numbers.items():
        parser.add_argument(f"--{name}", nargs="+", type=int, default=list(values), metavar="N")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0], metavar="X", help="0 is greedy")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each kind (default: 2)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer in tokens (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all cells (default: 3)")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def plans_of(options: argparse.Namespace) -> list[BenchPlan]:
    """Return the plan of each model. Several prompts are tried for each wanted one."""
    names = options.workloads or (PUBLISHED if options.data else workloads.BUILT_IN)
    drawn = workloads.load(names, TRIED * options.prompts, options.data)
    return [
        BenchPlan(
            model=model,
            strategies=(*options.strategies, AUTO),
            workloads=tuple(drawn),
            concurrency=tuple(options.concurrency),
            temperatures=tuple(options.temperature),
            contexts=tuple(options.context),
            rounds=options.rounds,
            max_tokens=options.tokens,
        )
        for model in options.models
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parse(arguments)
    begin(options)
    if options.quick:
        options.prompts, options.tokens, options.rounds = 1, 32, 1
    ends = time.monotonic() + 60 * options.minutes
    command = f"python -m benchmarks.router{' --data DIR' if options.data else ''}"
    path = results_path(options, "router")
    with one_line_errors("router"):
        plans = plans_of(options)
        order = spread(settings(plans))
        if not options.page:
            scale = replace(FULL, prompts=options.prompts, tokens=options.tokens)
            results = open_results(options, "router", command, {"head": head()})
            Measurement(plans, Setup(scale, options.data, options.cache), results).run(order, ends)
        header, rows = records.read(path)
    write_page(path, report(header, rows, len(order)))


if __name__ == "__main__":
    main()
