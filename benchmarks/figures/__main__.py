"""Command line: measures all parts, or those given with ``--only``, and writes their rows and the page of tables."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.figures.adversary import adversary
from benchmarks.figures.launch import launch
from benchmarks.figures.overhead import overhead
from benchmarks.figures.report import report
from benchmarks.options import add_run_flags, command_parser
from benchmarks.setup import FULL, QUICK, Setup
from parlay.bench.records import Results

PARTS: Mapping[str, Callable[[Setup, Results], None]] = {"launch": launch, "overhead": overhead, "adversary": adversary}

logger = logging.getLogger("benchmarks")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("figures", __doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    add_run_flags(parser)
    return parser.parse_args(arguments)


@one_line_errors("figures")
def main() -> int:
    """Run the requested parts. A part that fails is reported, and the others go on."""
    options = parse()
    begin(options)
    results = open_results(options, "figures", command(options))
    setup = Setup(QUICK if options.quick else FULL, options.data, options.cache)
    failures = [part for part in options.only if not run(part, setup, results)]
    write_page(results.path, report(results.header, results.rows))
    if failures:
        print(f"failed: {', '.join(failures)}")
    return 1 if failures else 0


def run(part: str, setup: Setup, results: Results) -> bool:
    """Run one part; return whether it finished without an error."""
    began = time.perf_counter()
    try:
        PARTS[part](setup, results)
    except Exception:
        logger.exception("%s failed", part)
        return False
    logger.info("%s took %.0f s", part, time.perf_counter() - began)
    return True


def command(options: argparse.Namespace) -> str:
    """Return the command that repeats the run, without folder names of this machine."""
    words = ["python -m benchmarks.figures"]
    words += ["--data DIR"] if options.data else []
    words += [f"--only {' '.join(options.only)}"] if options.only != [*PARTS] else []
    words += ["--quick"] if options.quick else []
    words += [f"--threads {options.threads}"] if options.threads != 2 else []
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
