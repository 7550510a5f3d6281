"""Command line: replays recorded answers, times strategies on the built-in models, and writes the tables."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.figures.compare import one_line
from benchmarks.figures.results import Block, Results, Row, read
from benchmarks.figures.setup import FULL, MINI, QUICK, WIDE, Setup
from benchmarks.options import add_run_flags
from benchmarks.strategies.guide import guide
from benchmarks.strategies.recorded import KINDS
from benchmarks.strategies.recorded import read as read_recorded
from benchmarks.strategies.replay import replay
from benchmarks.strategies.report import report
from benchmarks.strategies.speed import speed
from parlay import threads
from parlay.bench.provenance import ROOT, provenance
from parlay.bench.replay.tokens import open_tokens
from parlay.strategies.catalogue import catalogue

PARTS = ("replay", "speed", "speed-100m")
LEARNING = "tool calls"
"""Of these the first half only teaches: what counts is the second pass."""

logger = logging.getLogger("benchmarks")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="recorded answers and held-out documents")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--strategies", nargs="+", metavar="SPEC", help="instead of the whole catalogue")
    parser.add_argument("--records", type=int, default=100, help="recorded answers of each kind (default: 100)")
    parser.add_argument("--prompts", type=int, default=FULL.wide_prompts, help="prompts of each kind (default: 6)")
    parser.add_argument("--rounds", type=int, default=FULL.wide_rounds, help="rounds over them (default: 2)")
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
    scale = QUICK if options.quick else replace(FULL, wide_prompts=options.prompts, wide_rounds=options.rounds)
    setup = Setup(scale, options.data, options.cache)
    if "replay" in options.only and options.data is not None:
        threads.use(1)  # nothing is computed there
        replays(setup, results, options.strategies or without_models(), 10 if options.quick else options.records)
    threads.use(options.threads)
    for part, model in (("speed", MINI), ("speed-100m", WIDE)):
        if part in options.only:
            speed(setup, results, model, options.strategies or everything())
    out.with_suffix(".md").write_text(report(results.header, results.rows), encoding="utf-8")
    if options.guide is not None:
        others = [read(path)[1] for path in sorted(out.parent.glob(f"{out.stem}-*.jsonl"))]
        options.guide.write_text(guide(results.header, [results.rows, *others], MINI), encoding="utf-8")
    print(f"wrote {out} and {out.with_suffix('.md').name}")
    return 0


def everything() -> list[str]:
    """Every entry that runs without a file or models of the user's own, at its defaults."""
    return [name for name, entry in catalogue().items() if not entry.parameters.keys() & {"file", "models"}]


def without_models() -> list[str]:
    """Those that need no model; of them, `replay` leaves out those that look at what the target prefers."""
    return [name for name in everything() if catalogue()[name].family in ("copy", "store")]


def replays(setup: Setup, results: Results, specs: list[str], count: int) -> None:
    """Tokens per step of each strategy on each kind of recorded answer."""
    assert setup.data is not None
    tokens = open_tokens(MINI)
    for kind in KINDS:
        records = read_recorded(kind, setup.data, setup.tokenizer(), 2 * count if kind == LEARNING else count)
        first = len(records) // 2 if kind == LEARNING else 0
        for number, spec in enumerate(specs):
            block = Block("replay", spec, kind, number, 0)
            if results.has(block):
                continue
            try:
                done = replay(spec, records, tokens, first)
                row = Row(
                    **block._asdict(),
                    system=spec,
                    tokens=done.tokens,
                    steps=done.steps,
                    draft_tokens=done.draft_tokens,
                    accepted_tokens=done.accepted_tokens,
                    same=done.same,
                    values={"propose_us": 1e6 * done.propose_seconds},
                )
            except Exception as error:  # the row says so
                row = Row(**block._asdict(), system=spec, error=str(error) or one_line(error))
            results.add([row])
            logger.info("replay: %s on %s", spec, kind)


if __name__ == "__main__":
    sys.exit(main())
