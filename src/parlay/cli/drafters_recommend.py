"""`parlay drafters recommend`: the older spelling of `parlay bench PROMPTS`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from parlay.cli import bench_prompts
from parlay.cli.flags import add_model_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.set_defaults(draft_model=None, out=None, minutes=None, concurrency=(1,), context=(0,))
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", dest="file", help="your prompts")
    parser.add_argument("--strategies", metavar="NAMES", help="what to measure, joined by commas")
    parser.add_argument("--most", type=int, default=8, metavar="N", help="most prompts, the first ones (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of the best (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    for flag, value in (("--most", options.most), ("--max-tokens", options.max_tokens), ("--rounds", options.rounds)):
        if value < 1:
            raise ValueError(f"{flag} {value}: give at least 1")
    if not 0 <= options.temperature <= 100:
        raise ValueError(f"--temperature {options.temperature}: give a number from 0 to 100")
    options.prompts, options.temperature = options.most, (options.temperature,)
    code = bench_prompts.run(options, [options.file])
    print(f"parlay: note: this is parlay bench {options.file}, which has more flags", file=sys.stderr)
    return code
