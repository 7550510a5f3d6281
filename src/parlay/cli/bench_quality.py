"""`parlay bench --quality`: how many answers to generated tasks are right, and at how many tokens per forward."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli import FAILURE
from parlay.cli.flags import options_from
from parlay.options import LoadOptions
from parlay.system.terminal import aligned

if TYPE_CHECKING:
    from parlay.bench.quality.tasks import Task
    from parlay.bench.quality.writers import ModelWriter, OracleWriter
    from parlay.bench.records import Results
    from parlay.llm.llm import LLM

OUT = Path("parlay-quality.jsonl")
QUALITY_FILE = "quality.json"
PROBLEMS, SAMPLES, MAX_TOKENS = 50, 300, 48
EXACT_STRATEGIES = 4
"""How many strategies with plain decoding's text are measured, of those that need no training."""
MEANINGLESS: Mapping[str, object] = {
    "files": [],
    "workloads": None,
    "preset": None,
    "data": None,
    "against": None,
    "minutes": None,
    "rounds": None,
    "concurrency": (1,),
    "temperature": (0.0,),
    "context": (0,),
    "keep_loops": False,
    "price_per_hour": None,
    "json": False,
    "replay": None,
    "tokenizer": None,
    "cost_model": None,
    "cost_table": None,
    "forwards": False,
    "force": False,
}
"""Flags that are not used here, and their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "quality", "count right answers to generated tasks at each number of tokens per forward"
    )
    group.add_argument("--quality", action="store_true", help="measure quality under parallelism")
    group.add_argument(
        "--tasks",
        metavar="NAMES",
        help="joined by commas: copy, reverse, sort, shuffle, permutation, replace-at, replace, choose, arithmetic, "
        "latin, sudoku, grammar, sentence, summary (default: all)",
    )
    group.add_argument(
        "--selectors",
        metavar="NAMES",
        help="joined by commas: selectors of denoise, each in all its settings (default: all, where the model fills "
        "canvases)",
    )
    group.add_argument(
        "--examples",
        type=int,
        choices=range(9),
        metavar="N",
        help="solved problems before each question, 0 to 8 (default: 2)",
    )
    group.add_argument(
        "--oracle",
        action="store_true",
        help="no model: a target whose probabilities are those of the right answers, so what is lost is lost to "
        "parallelism alone",
    )


def refuse_without(options: argparse.Namespace) -> None:
    """Raises ValueError for a flag that only --quality uses."""
    for name in ("tasks", "selectors", "examples", "oracle"):
        if vars(options)[name] not in (None, False):
            raise ValueError(f"--{name} works only with --quality: add it, or remove --{name}")


def run(options: argparse.Namespace) -> int:
    for name, usual in MEANINGLESS.items():
        if vars(options)[name] != usual:
            flag = "files of prompts" if name == "files" else f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} can't be used with --quality, which makes its own problems: remove one of them")
    from parlay.bench.quality import tasks  # here, as these import torch
    from parlay.bench.quality.run import measure
    from parlay.bench.report import plot
    from parlay.system.progress import Ticker

    found = tasks.find(list(tasks.TASKS) if options.tasks is None else options.tasks.split(","))
    if options.output is not None and not options.no_plots:
        plot.check()
    with ExitStack() as stack:
        writer, strategies, found = _oracle(options, found) if options.oracle else _model(options, found, stack)
        results = _results(options, writer)
        ticker = stack.enter_context(Ticker(len(found) * len(strategies), "parlay bench", "point"))
        measure(writer, found, strategies, results, lambda note: ticker.step(note=note))
        print("\n".join(_tables(results)))
        print(f"\nrows in {options.out or OUT}")
        for path in _written(options, results, writer):
            print(path)
    return 0 if any(row.requests for row in results.rows) else FAILURE


def _oracle(
    options: argparse.Namespace, found: Sequence[Task]
) -> tuple[OracleWriter, tuple[str, ...], tuple[Task, ...]]:
    """The oracle, its selectors and tasks. Raises ValueError for a flag of models, and for a task without an oracle."""
    from parlay.bench.presets import strategies
    from parlay.bench.quality.run import SWEEP, sweep
    from parlay.bench.quality.writers import OracleWriter
    from parlay.bench.records import PLAIN

    for name in ("model", "draft_model", "max_tokens", "examples", "effort"):
        if vars(options)[name] is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} can't be used with --oracle, which runs no model: remove one of them"
            )
    unknown = [task.name for task in found if not task.listed]
    if options.tasks and unknown:
        raise ValueError(f"task {unknown[0]} has too many right answers for --oracle: remove it from --tasks")
    swept = sweep(options.selectors.split(",") if options.selectors else list(SWEEP))
    chosen = strategies(options.strategies) if options.strategies else (PLAIN, *swept)
    return OracleWriter(options.prompts or SAMPLES), chosen, tuple(task for task in found if task.listed)


def _model(
    options: argparse.Namespace, found: Sequence[Task], stack: ExitStack
) -> tuple[ModelWriter, tuple[str, ...], tuple[Task, ...]]:
    from parlay.bench.quality import tasks
    from parlay.bench.quality.writers import ModelWriter
    from parlay.llm.llm import LLM
    from parlay.models.fetch.pulled import named_or_default

    model = named_or_default(options.model)
    load = options_from(LoadOptions, options)
    llm = stack.enter_context(LLM(model, load=load, draft_model=options.draft_model, router_memory="off"))
    chosen = _strategies(options, llm)
    name = Path(model).resolve().name if Path(model).exists() else model
    examples = tasks.EXAMPLES if options.examples is None else options.examples
    writer = ModelWriter(llm, name, options.prompts or PROBLEMS, options.max_tokens or MAX_TOKENS, examples)
    for task in found:
        writer.check(task)
    return writer, chosen, tuple(found)


def _strategies(options: argparse.Namespace, llm: LLM) -> tuple[str, ...]:
    """The strategies to measure. Raises ValueError for canvases if the model can't fill any."""
    from parlay.bench.presets import strategies
    from parlay.bench.quality.run import SWEEP, sweep
    from parlay.bench.records import PLAIN
    from parlay.bench.trial import usual_strategies
    from parlay.strategies.catalogue import find
    from parlay.strategies.spelling import name_of

    spec = llm.runner.spec
    named = strategies(options.strategies) if options.strategies else ()
    fills = [name for name in named if find(name_of(name)).selects]
    if spec.canvas is None and (options.selectors or fills):
        asked = f"--selectors {options.selectors}" if options.selectors else f"strategy {fills[0]}"
        raise ValueError(f"{asked} is for diffusion models, and {spec.name} is not one: remove it")
    if options.selectors or (not named and spec.canvas is not None):
        named += sweep(options.selectors.split(",") if options.selectors else list(SWEEP))
    exact = () if options.strategies or spec.fills_only else (PLAIN, *usual_strategies(llm)[:EXACT_STRATEGIES])
    return tuple(dict.fromkeys((*exact, *named)))


def _results(options: argparse.Namespace, writer: ModelWriter | OracleWriter) -> Results:
    from parlay.bench.provenance import loading, provenance
    from parlay.bench.records import Results

    settings = {
        "prompts": options.prompts,
        "max_tokens": options.max_tokens,
        "examples": options.examples,
        "options": loading(options_from(LoadOptions, options), options.draft_model),
    }
    return Results(options.out or OUT, provenance(_command(options, writer.name), settings), fresh=options.fresh)


def _tables(results: Results) -> list[str]:
    """The page's first tables as text."""
    from parlay.bench.quality.page import sections

    lines: list[str] = []
    for section in sections(results.rows):
        if section.title.endswith(("one number each", "what each task allows", "formula / measured")):
            for table in section.tables:
                lines += ["", section.title, *aligned([list(table.head), *map(list, table.lines)], 1)]
        elif not section.tables:
            lines += ["", f"Did not run: {section.text}"]
    return lines[1:]  # without the empty first line


def _written(options: argparse.Namespace, results: Results, writer: ModelWriter | OracleWriter) -> list[Path]:
    """Write the page, its plots, and the file for calibration, if a folder was given; returns their paths."""
    if options.output is None:
        return []
    from parlay.bench.quality.curves import kept_lossy
    from parlay.bench.quality.page import write
    from parlay.bench.quality.writers import ModelWriter
    from parlay.bench.report.sources import gather
    from parlay.bench.report.write import origin
    from parlay.certificates.certificate import write as write_part
    from parlay.certificates.quality import Quality

    paths = write(results.rows, origin(gather([results.path])), options.output, pictures=not options.no_plots)
    found = kept_lossy(results.rows, writer.name)
    if found and isinstance(writer, ModelWriter):
        path = options.output / QUALITY_FILE
        write_part(Quality(writer.llm.gate.binding(), tuple(found)), path)
        paths.append(path)
    elif not isinstance(writer, ModelWriter):
        print("nothing is written for parlay calibrate, because --oracle runs no model", file=sys.stderr)
    return paths


def _command(options: argparse.Namespace, model: str) -> str:
    """The command line that repeats the run, without local folders."""
    words = ["parlay", "bench", "--quality", *(["--oracle"] if options.oracle else ["--model", model])]
    for name in ("tasks", "selectors", "strategies", "prompts", "max_tokens", "examples"):
        if vars(options)[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(vars(options)[name])]
    return shlex.join(words)
