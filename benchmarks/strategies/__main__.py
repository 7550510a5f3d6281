"""Command line: replays recorded answers, times strategies on SmolLM2, and writes the tables."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.commands import one_line_errors, open_results, show_log, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.setup import FULL, QUICK, SMOLLM2, Setup
from benchmarks.strategies.replays import replays
from benchmarks.strategies.report import report
from benchmarks.strategies.speed import speed
from parlay.drafters.options import HEADS_OF_OTHERS
from parlay.heads import store
from parlay.strategies.catalogue import catalogue, for_any_target
from parlay.system import threads

PARTS = ("replay", "speed")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("strategies", __doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="recorded answers and published sets of prompts")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--strategies", nargs="+", metavar="SPEC", help="instead of the whole catalogue")
    parser.add_argument("--records", type=int, default=100, help="recorded answers of each kind (default: 100)")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each kind (default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over the prompts (default: 2)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer in tokens (default: 64)")
    add_run_flags(parser)
    return parser.parse_args(arguments)


@one_line_errors("strategies")
def main() -> None:
    """Measure, and write the report."""
    options = parse()
    show_log()
    command = f"python -m benchmarks.strategies{' --data DIR' if options.data else ''}"
    results = open_results(options, "strategies", command)
    asked = replace(FULL, wide_prompts=options.prompts, wide_rounds=options.rounds, tokens=options.tokens)
    scale = QUICK if options.quick else asked
    setup = Setup(scale, options.data, options.cache)
    if "replay" in options.only and options.data is not None:
        threads.use(1)  # nothing is computed there
        count = 10 if options.quick else options.records
        replays(options.data, results, options.strategies or without_models(), count)
    threads.use(options.threads)
    if "speed" in options.only:
        speed(setup, results, SMOLLM2, options.strategies or [*everything(), *with_drafters()])
    write_page(results.path, report(results.header, results.rows))


def everything() -> list[str]:
    """Return the entries that need only a target that writes token by token, with default options."""
    return for_any_target(without={"file", "head", "model", "models", "url"})


def with_drafters() -> list[str]:
    """Return the strategies for which this machine has a drafter of SmolLM2: the package's, and those that the user
    added."""
    methods = {each.facts.method for each in store.drafters() if each.facts.origin.target == SMOLLM2}
    heads = [name for name in catalogue() if HEADS_OF_OTHERS.get(name, name) in methods]
    return [*heads, "draft-model"]


def without_models() -> list[str]:
    """Return the strategies that need no model. `replay` leaves out those that read the target's predictions."""
    return [name for name in everything() if catalogue()[name].family in ("copy", "store")]


if __name__ == "__main__":
    main()
