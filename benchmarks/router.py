"""`auto` against static strategies, by model, kind of text, requests at once, temperature and context.

There are more cells than one run has time for. They are measured in an order of which every beginning holds each value
of each dimension about equally often, so ``--minutes`` may end a run anywhere; the next one goes on with the same file.
Strategies run interleaved, tokens before any loop count only, and every text is held against that of plain decoding.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.commands import begin, one_line_errors, open_results, results_path, write_page
from benchmarks.options import add_run_flags
from benchmarks.router_cells import Setting, left_over, settings, spread
from benchmarks.router_page import AUTO, report
from benchmarks.setup import FULL, KINDS, MINI, SMOLLM2, SMOLLM2_BF16, Setup
from parlay.bench import records, workloads
from parlay.bench.prepare import Preparation, lasting
from parlay.bench.records import OURS, PLAIN, Results, Row
from parlay.bench.rounds import Rounds, one_line
from parlay.bench.wave import Prepared, Waves
from parlay.bench.workloads import Workload
from parlay.heads.store import SHIPPED
from parlay.llm import LLM
from parlay.models.loading import weight_files

MODELS = (SMOLLM2, SMOLLM2_BF16, MINI)
STATIC = (
    "prompt-lookup",
    "suffix-decoding",
    "eagle3",
    "union:of=prompt-lookup+eagle3",
    "token-recycling",
)
"""What `auto` is compared with beside plain decoding."""
_SPEC_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("translation", "summarization", "qa", "math_reasoning", "rag"),
)
SETS: Mapping[str, str] = {
    "edit": "editeval",
    "calls": "bfcl-simple",
    **{category: f"spec-bench/{category}" for category in _SPEC_BENCH},
}
"""Published sets by kind of text; without ``--data`` the kinds are those of the built-in prompts."""
TRIED = 4
"""Prompts looked at for each one wanted: the text of many loops at once."""
LONG = 1024
"""Tokens of context from which one prompt is enough: feeding it takes longer than decoding."""


class Measured:
    """One model, loaded, with what was prepared for it. Each strategy is warmed up once per number at once."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self._llm = llm
        self._options = options
        waves = Waves(llm)
        self._rounds = Rounds({OURS: waves})
        self._preparation = Preparation(llm, waves, options.tokens)
        self._workloads: dict[str, Workload] = {}
        self._prepared: dict[tuple[str, float, int], Prepared] = {}

    def round(self, setting: Setting, number: int) -> list[Row]:
        """A round of plain decoding, every static strategy, and `auto`. A failure becomes rows with its error."""
        cells = [setting.cell(strategy) for strategy in (PLAIN, *self._options.strategies, AUTO)]
        try:
            prepared = self._ready(setting)
        except Exception as error:  # the rows say so
            return [Row(cell=cell, round=number, error=one_line(error)) for cell in cells]
        return self._rounds.measure(cells, prepared, number)

    def _ready(self, setting: Setting) -> Prepared:
        key = (setting.workload, setting.temperature, setting.context)
        if key not in self._prepared:
            workload = self._workload(setting.workload)
            few = workload.items[:1] if setting.context > LONG else workload.items
            workload = replace(workload, items=few)
            self._prepared[key] = self._preparation.prepare(workload, setting.temperature, setting.context)
        return self._prepared[key]

    def _workload(self, kind: str) -> Workload:
        if kind not in self._workloads:
            count, data = self._options.prompts, self._options.data
            (found,) = workloads.load([SETS[kind] if data else kind], TRIED * count, data)
            self._workloads[kind] = lasting(self._llm, replace(found, name=kind), count, self._options.tokens)
        return self._workloads[kind]


def measure(results: Results, order: Sequence[Setting], options: argparse.Namespace) -> None:
    """Every cell that lacks a round, until the minutes are over; what is finished is in the file at once."""
    ends = time.monotonic() + 60 * options.minutes
    setup = Setup(FULL, options.data, options.cache)
    loaded: dict[str, Measured] = {}
    with ExitStack() as stack:
        for setting, number in left_over(order, options.rounds, lambda each: len(results.of(each.cell(AUTO)))):
            if time.monotonic() >= ends:
                return
            if setting.model not in loaded:
                loaded[setting.model] = Measured(stack.enter_context(setup.llm(setting.model)), options)
            results.add(loaded[setting.model].round(setting, number))


def head() -> str:
    """The hash of the trained head that ships for SmolLM2, its first twelve digits."""
    files = weight_files(SHIPPED / "eagle3" / SMOLLM2)
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="no cell begins after so many")
    parser.add_argument("--page", action="store_true", help="make the page again from the file, and measure nothing")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--strategies", nargs="+", default=list(STATIC), metavar="SPEC", help="to compare `auto` with")
    parser.add_argument("--kinds", nargs="+", choices=sorted({*SETS, *KINDS}), help="of text (default: all)")
    numbers = {"concurrency": (1, 4, 16, 64), "context": (512, 4096)}
    for name, values in numbers.items():
        parser.add_argument(f"--{name}", nargs="+", type=int, default=list(values), metavar="N")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0], metavar="X", help="0 is greedy")
    parser.add_argument(
        "--prompts", type=int, default=2, help=f"of each kind (default: 2); 1 behind over {LONG} tokens"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each answer at most (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="over all cells, one after another (default: 3)")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def asked(options: argparse.Namespace) -> list[Setting]:
    """The settings that the flags leave, in the order in which they are measured."""
    kinds = options.kinds or list(SETS if options.data else KINDS)
    unknown = sorted(set(kinds) - set(SETS if options.data else KINDS))
    if unknown:
        raise ValueError(f"no prompts of kind {unknown[0]!r} {'in --data' if options.data else 'without --data DIR'}")
    return spread(settings(options.models, kinds, options.concurrency, options.temperature, options.context))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parse(arguments)
    begin(options)
    if options.quick:
        options.prompts, options.tokens, options.rounds = 1, 32, 1
    command = f"python -m benchmarks.router{' --data DIR' if options.data else ''}"
    path = results_path(options, "router")
    with one_line_errors("router"):
        order = asked(options)
        if not options.page:
            measure(open_results(options, "router", command, {"head": head()}), order, options)
        header, rows = records.read(path)
    write_page(path, report(header, rows, len(order)))


if __name__ == "__main__":
    main()
