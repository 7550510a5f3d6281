"""`auto` against strategies with one drafter, by kind of text, requests at once, and temperature.

Strategies run interleaved, tokens before any loop count only, and every text is held against that of plain decoding.
Flags choose a part of the cells; further runs go on with the same file, whatever part they measure.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags
from benchmarks.pages import HOW, about, failures, shown, table
from benchmarks.setup import FULL, KINDS, QUICK, SMOLLM2, SMOLLM2_BF16, Setup
from parlay.bench.records import PLAIN, Cell, Results
from parlay.bench.runner import Bench, BenchPlan
from parlay.bench.summary import Measurements

AUTO = "auto"
STATIC = ("prompt-lookup", "suffix-decoding", "eagle3")
"""Strategies with one drafter: what `auto` chooses from on SmolLM2, and the default."""
LONE = STATIC[0]
LEAST, MEAN, PLAINLY = 0.95, 0.98, 0.98
"""Goals: of the best in hindsight in each cell and in geometric mean, and of plain decoding in each cell."""


def measure(setup: Setup, results: Results, options: argparse.Namespace) -> None:
    """All strategies on one model."""
    kinds = setup.workloads(options.model, options.kinds)
    with setup.llm(options.model) as llm:
        plan = BenchPlan(
            model=options.model,
            strategies=(*options.strategies, AUTO),
            workloads=kinds,
            concurrency=tuple(options.concurrency),
            temperatures=tuple(options.temperature),
            rounds=options.rounds,
            max_tokens=setup.scale.tokens,
        )
        Bench(llm, plan, results).run(ends=time.monotonic() + options.seconds)


def report(results: Results) -> str:
    """The page: a line for each cell, then what they come to."""
    found = Measurements(results.rows)
    names = list(dict.fromkeys(cell.strategy for cell in found.cells if cell.strategy not in (PLAIN, AUTO)))
    autos = sorted(
        (cell for cell in found.cells if cell.strategy == AUTO),
        key=lambda cell: (cell.model, cell.temperature, cell.workload, cell.concurrency),
    )
    lines = ["# `auto` against strategies with one drafter", "", about(results.header), "", HOW, ""]
    head = ("model", "text", "at once", "temperature", *(f"`{name}`" for name in (*names, AUTO)), "of the best")
    lines += table(head, [_line(found, cell, names) for cell in autos])
    lines += [*(_verdicts(found, autos, names) if autos else []), *failures(found)]
    return "\n".join(lines)


def _line(found: Measurements, cell: Cell, names: Sequence[str]) -> Sequence[str]:
    """One setting: every strategy over plain decoding, and `auto` over the best of them."""
    ratios = [found.ratio(replace(cell, strategy=name), replace(cell, strategy=PLAIN)) for name in (*names, AUTO)]
    share = _of_best(found, cell, names)
    return (
        *(cell.model, cell.workload, str(cell.concurrency), f"{cell.temperature:g}"),
        *(shown(each) for each in ratios),
        f"{share:.2f}",
    )


def _of_best(found: Measurements, cell: Cell, names: Sequence[str]) -> float:
    """`auto` over the best of the others, plain decoding included: median over median."""
    return _over_plain(found, cell) / max(1.0, *(_over_plain(found, replace(cell, strategy=name)) for name in names))


def _over_plain(found: Measurements, cell: Cell) -> float:
    ratio = found.ratio(cell, replace(cell, strategy=PLAIN))
    return ratio.median if ratio is not None else math.nan


def _verdicts(found: Measurements, autos: Sequence[Cell], names: Sequence[str]) -> list[str]:
    shares = [_of_best(found, cell, names) for cell in autos]
    over_plain = [_over_plain(found, cell) for cell in autos]
    single = {
        name: geometric_mean(_over_plain(found, replace(cell, strategy=name)) for cell in autos) for name in names
    }
    over_lone = [_over_plain(found, cell) / _over_plain(found, replace(cell, strategy=LONE)) for cell in autos]
    best = max(single, key=lambda name: single[name])
    return [
        f"Of the best in hindsight: {geometric_mean(shares):.2f} in geometric mean ({MEAN:g} was the goal), "
        f"{min(shares):.2f} in the least cell ({LEAST:g}).",
        "",
        f"Over plain decoding: {geometric_mean(over_plain):.2f} in geometric mean, {min(over_plain):.2f} in the least "
        f"cell ({PLAINLY:g}). The best single strategy, `{best}`: {single[best]:.2f}.",
        "",
        f"Over `{LONE}`: {geometric_mean(over_lone):.2f} in geometric mean, {min(over_lone):.2f} in the least cell.",
        "",
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--model", default=SMOLLM2, help=f"default: {SMOLLM2}; also {SMOLLM2_BF16}")
    parser.add_argument("--strategies", nargs="+", default=list(STATIC), metavar="SPEC", help="to compare `auto` with")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of text (default: all)")
    parser.add_argument(
        "--concurrency", nargs="+", type=int, default=[1, 4, 16, 64], metavar="N", help="requests at once"
    )
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0], metavar="X", help="0 is greedy")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind (default: 2)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer at most (default: 96)")
    parser.add_argument("--rounds", type=int, default=3, help="over them (default: 3)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="N", help="no round begins that would end later"
    )
    add_run_flags(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and write the page."""
    options = parse()
    begin(options)
    asked = replace(FULL, wide_prompts=options.prompts, prompts=options.prompts, tokens=options.tokens)
    setup = Setup(QUICK if options.quick else asked, options.data, options.cache)
    command = f"python -m benchmarks.router{' --data DIR' if options.data else ''}"
    with one_line_errors("router"):
        results = open_results(options, "router", command)
        measure(setup, results, options)
    write_page(results.path, report(results))


if __name__ == "__main__":
    main()
