"""Command line: replays recorded answers, times strategies on SmolLM2, and writes the tables."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.options import add_run_flags
from benchmarks.setup import FULL, QUICK, SMOLLM2, Setup
from benchmarks.strategies.guide import guide
from benchmarks.strategies.replays import replays
from benchmarks.strategies.report import report
from benchmarks.strategies.speed import speed
from parlay import threads
from parlay.bench.provenance import ROOT, provenance
from parlay.bench.records import Results, read
from parlay.strategies.catalogue import catalogue

PARTS = ("replay", "speed")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="recorded answers and published sets of prompts")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--strategies", nargs="+", metavar="SPEC", help="instead of the whole catalogue")
    parser.add_argument("--records", type=int, default=100, help="recorded answers of each kind (default: 100)")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each kind (default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over them (default: 2)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer at most (default: 64)")
    add_run_flags(parser)
    parser.add_argument("--guide", type=Path, metavar="FILE", help="write the table of docs/strategies.md there")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, and write the report."""
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    name = "strategies-quick" if options.quick else "strategies"
    out = options.out or ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    words = ["python -m benchmarks.strategies", *(["--data DIR"] if options.data else [])]
    try:
        results = Results(out, provenance(" ".join(words)), fresh=options.fresh)
    except ValueError as error:
        print(f"benchmarks.strategies: {error}", file=sys.stderr)
        return 1
    asked = replace(FULL, wide_prompts=options.prompts, wide_rounds=options.rounds, tokens=options.tokens)
    scale = QUICK if options.quick else asked
    setup = Setup(scale, options.data, options.cache)
    if "replay" in options.only and options.data is not None:
        threads.use(1)  # nothing is computed there
        count = 10 if options.quick else options.records
        replays(options.data, results, options.strategies or without_models(), count)
    threads.use(options.threads)
    if "speed" in options.only:
        speed(setup, results, SMOLLM2, options.strategies or everything())
    out.with_suffix(".md").write_text(report(results.header, results.rows), encoding="utf-8")
    if options.guide is not None:
        others = [read(path)[1] for path in sorted(out.parent.glob(f"{out.stem}-*.jsonl"))]
        options.guide.write_text(guide(results.header, [results.rows, *others], SMOLLM2), encoding="utf-8")
    print(f"wrote {out} and {out.with_suffix('.md').name}")
    return 0


def everything() -> list[str]:
    """Every entry that wants nothing but the target, at its defaults."""
    own = {"file", "head", "model", "models"}
    return [name for name, entry in catalogue().items() if not entry.parameters.keys() & own]


def without_models() -> list[str]:
    """Those that need no model; of them, `replay` leaves out those that look at what the target prefers."""
    return [name for name in everything() if catalogue()[name].family in ("copy", "store")]


if __name__ == "__main__":
    sys.exit(main())
