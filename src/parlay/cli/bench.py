"""`parlay bench`: measures strategies on your prompts or on workloads, compared with plain decoding."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parlay.cli import bench_prompts, bench_quality, bench_replay, code_of, flags, parser_of
from parlay.options import LoadOptions
from parlay.system.user_cache import check_makeable

if TYPE_CHECKING:
    from parlay.bench.presets import Preset
    from parlay.bench.records import Row
    from parlay.bench.runner import Bench, BenchPlan
    from parlay.bench.workloads import Workload
    from parlay.llm.llm import LLM
    from parlay.types import RunnerSpec

OUT = Path("parlay-bench.jsonl")
MOST_TOGETHER, MOST_AT_ALL = 32, 512
"""The engine's most concurrent requests by default, and the most that can be asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="PROMPTS",
        help="your prompts, to find the best strategy for them: text with a prompt on each line, or JSON (lines or one "
        f"list) with prompt or messages; at most {bench_prompts.PROMPTS} are taken unless --prompts says more. Or the "
        "word report, and files of results",
    )
    flags.add_model_flags(parser)
    _add_cases(parser)
    _add_amounts(parser)
    _add_conditions(parser)
    _add_output(parser)
    bench_replay.add_arguments(parser)
    bench_quality.add_arguments(parser)
    _add_report_flags(parser)


def _add_cases(parser: argparse.ArgumentParser) -> None:
    flags.add_draft_flags(parser, "small model for strategies that draft with one")
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="values for flags that are not given: quick, standard, readme, spec-bench, "
        "speed-bench or published (default: standard)",
    )
    parser.add_argument(
        "--workloads",
        metavar="NAMES",
        help="joined by commas: edit, copy, code, maths, translation, calls, prose, long; files as PATH or NAME=PATH; "
        "with --data spec-bench, mt-bench, editeval, humaneval, bfcl-simple, llma-questions, ...",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of published sets: see docs/how-to/measure.md")
    parser.add_argument(
        "--strategies",
        metavar="NAMES",
        help="joined by commas; parlay strategies lists them; all: those that need no files or models of yours",
    )
    flags.add_effort_flag(parser)
    parser.add_argument(
        "--against",
        choices=["transformers"],
        help="measure this engine too: plain, compiled, and with its prompt lookup",
    )


def _add_amounts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=flags.whole_from(1), metavar="N", help="most prompts of a workload, or of your own"
    )
    parser.add_argument(
        "--minutes",
        type=flags.positive,
        metavar="X",
        help="with PROMPTS: most time for it all, loading included; two strategies always finish one prompt "
        f"(default: {bench_prompts.MINUTES:g})",
    )
    parser.add_argument(
        "--rounds",
        type=flags.whole_from(1),
        metavar="N",
        help="measurements of each strategy on each workload (default: 3, up to 9 while the ratio is uncertain)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--price-per-hour",
        type=flags.positive,
        metavar="X",
        help="price of an hour of this machine: adds a column of tokens per unit of currency",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"file for the rows of results; a second run continues it (default: {OUT}; with PROMPTS: none, or anew)",
    )
    parser.add_argument("--fresh", action="store_true", help="overwrite the file")
    parser.add_argument("--json", action="store_true", help="with PROMPTS: print one JSON object")


def _add_conditions(parser: argparse.ArgumentParser) -> None:
    """Add flags for the conditions under which strategies are compared."""
    parser.add_argument(
        "--concurrency",
        type=flags.comma_list(flags.whole_from(1, MOST_AT_ALL)),
        default=(1,),
        metavar="N,...",
        help="requests at once (default: 1)",
    )
    parser.add_argument(
        "--temperature",
        type=flags.comma_list(flags.not_negative),
        default=(0.0,),
        metavar="X,...",
        help="0 is greedy (default: 0)",
    )
    parser.add_argument(
        "--context",
        type=flags.comma_list(flags.whole_from(0)),
        default=(0,),
        metavar="N,...",
        help="lengthen prompts to N tokens by filler text; 0: none (default: 0)",
    )
    parser.add_argument(
        "--max-tokens",
        type=flags.whole_from(1),
        metavar="N",
        help="longest answer (default: what each prompt asks for, mostly 128)",
    )
    parser.add_argument(
        "--keep-loops",
        action="store_true",
        help="keep the part of an answer that comes after it begins to repeat itself",
    )


def run(options: argparse.Namespace) -> int:
    if options.files and str(options.files[0]) == "report":
        return _report(options)
    if options.out is not None:
        check_makeable(options.out)
    if options.quality:
        return bench_quality.run(options)
    bench_quality.refuse_without(options)
    _refuse_report_flags(options)
    if options.files:
        return bench_prompts.run(options, options.files)
    for name in ("minutes", "json"):
        if vars(options)[name]:
            raise ValueError(f"--{name} works only with files of prompts: add one, or remove --{name}")
    options.out = options.out or OUT
    if options.replay is not None:
        return bench_replay.run(options)
    bench_replay.refuse_without(options)
    return _measure(options)


# ----------------------------------------------------------------------------------------------------------- report


def _add_report_flags(bench: argparse.ArgumentParser) -> None:
    group = bench.add_argument_group("report", "parlay bench report RESULTS ... -o DIR makes a page of results")
    group.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="where the report goes, or the page of --quality"
    )
    group.add_argument("--force", action="store_true", help="put different machines or versions into one report")
    group.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")


def _refuse_report_flags(options: argparse.Namespace) -> None:
    """Raises ValueError for a flag that only a report uses."""
    for name in ("output", "force", "no_plots"):
        if vars(options)[name]:
            raise ValueError(f"--{name.replace('_', '-')} works only with parlay bench report or --quality: remove it")


def _refuse_with_report(options: argparse.Namespace) -> None:
    """Raises ValueError for a flag that a report does not use."""
    usual = vars(parser_of("bench").parse([]))
    for name in usual:
        if name not in ("files", "output", "force", "no_plots") and vars(options)[name] != usual[name]:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with parlay bench report: remove it")


def _report(options: argparse.Namespace) -> int:
    results = options.files[1:]
    if not results or options.output is None:
        raise ValueError(
            "RESULTS or --output is missing: name files that parlay bench wrote, and a folder with --output DIR"
        )
    _refuse_with_report(options)
    from parlay.bench.report.write import write  # here, as it imports torch

    for path in write(results, options.output, force=options.force, plots=not options.no_plots):
        print(path)
    return 0


# -------------------------------------------------------------------------------------------------------- measuring


def _measure(options: argparse.Namespace) -> int:
    from parlay.bench import workloads  # here, as these import torch and transformers
    from parlay.bench.presets import strategies
    from parlay.models.fetch.pulled import named_or_default
    from parlay.strategies.spelling import all_with_effort

    preset = _preset(options.preset)
    _check_against(options, preset)
    chosen = strategies(",".join(preset.strategies) if options.strategies is None else options.strategies)
    if options.effort is not None:
        chosen = all_with_effort(chosen, options.effort)
    names = preset.workloads if options.workloads is None else options.workloads.split(",")
    found = workloads.load(names, options.prompts or preset.prompts, options.data)
    options.model = named_or_default(options.model)
    with _open(options) as llm:
        plan = _plan(options, preset, chosen, found)
        return _run(options, llm, plan)


def _preset(name: str | None) -> Preset:
    from parlay.bench.presets import PRESETS

    if name is not None and name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name or "standard"]


def _check_against(options: argparse.Namespace, preset: Preset) -> None:
    """Raises ValueError if `transformers` could not be measured in any cell, or not with the same weights."""
    if not (options.against or preset.against):
        return
    if options.quantize:
        raise ValueError(
            "--against transformers can't be used with --quantize: it runs the weights as stored; remove one of them"
        )
    if not (1 in options.concurrency and 0 in options.temperature):
        raise ValueError(
            "--against transformers runs only one request at a time, at temperature 0: "
            "include 1 in --concurrency and 0 in --temperature, or remove --against"
        )


def _plan(
    options: argparse.Namespace, preset: Preset, strategies: tuple[str, ...], workloads: list[Workload]
) -> BenchPlan:
    from parlay.bench.against import MODES
    from parlay.bench.runner import BenchPlan

    return BenchPlan(
        model=_without_folders(options.model),
        strategies=strategies,
        workloads=tuple(workloads),
        concurrency=options.concurrency,
        temperatures=options.temperature,
        contexts=options.context,
        against=MODES if options.against or preset.against else (),
        rounds=options.rounds or preset.rounds,
        most_rounds=options.rounds or preset.most_rounds,
        max_tokens=options.max_tokens,
        keep_loops=options.keep_loops,
    )


def _open(options: argparse.Namespace) -> LLM:
    from parlay.llm.llm import LLM

    return LLM(
        options.model,
        load=flags.options_from(LoadOptions, options),
        draft_model=options.draft_model,
        max_num_seqs=max(MOST_TOGETHER, *options.concurrency),
        router_memory="off",  # measurements must not depend on earlier ones
    )


def _conditions(options: argparse.Namespace, spec: RunnerSpec, plan: BenchPlan) -> dict[str, Any]:
    """The conditions that all rows of a run share, including how busy other processes keep the machine."""
    from parlay.bench.host import busy_cores
    from parlay.bench.provenance import loading

    return {
        "dtype": spec.dtype,
        "quantize": options.quantize,
        "device": spec.device,
        "kernels": spec.kernels,
        "busy_cores": busy_cores(),
        "options": loading(flags.options_from(LoadOptions, options), options.draft_model),
        "settings": {
            "prompts": options.prompts or _preset(options.preset).prompts,
            "max_tokens": plan.max_tokens,
            "keep_loops": plan.keep_loops,
        },
    }


def _run(options: argparse.Namespace, llm: LLM, plan: BenchPlan) -> int:
    from parlay.bench.against import NAME, Transformers
    from parlay.bench.forwards import add_missing, weight_bytes
    from parlay.bench.host import busy_note
    from parlay.bench.provenance import provenance
    from parlay.bench.records import OURS, Results, fingerprint
    from parlay.bench.runner import Bench
    from parlay.bench.wave import Waves
    from parlay.cost.energy import choose_meter
    from parlay.cost.energy.power_model import modelled_power
    from parlay.models.fetch.resolving import resolve

    spec = llm.runner.spec
    conditions = _conditions(options, spec, plan)
    texts = {each.name: fingerprint(each.items) for each in plan.workloads}
    results = Results(options.out, provenance(_command(options), conditions), fresh=options.fresh, texts=texts)
    if options.forwards:
        weights = weight_bytes(resolve(options.model), options.quantize or spec.dtype)
        add_missing(llm.runner, plan.model, results, weights)
    meter = choose_meter(spec.device)
    power = None if meter.includes else modelled_power(spec.device, llm.engine.cost)
    peer = Transformers(resolve(options.model), spec.device, spec.dtype, meter)
    stopped = _with_progress(Bench(llm, plan, results, {OURS: Waves(llm, meter, power), NAME: peer}))
    _print_tables(results.rows, plan, options.price_per_hour)
    if stopped:
        print(f"parlay: stopped: repeat the same command to continue {options.out}", file=sys.stderr)
        return stopped
    form = "" if resolve(options.model).is_file() else f" in {spec.dtype}"
    energy = meter.reason if power is None else f"{power}, because {meter.reason}"
    last = f"{spec.name}{form} on {spec.device}; energy: {energy}; rows in {options.out}"
    print("\n".join(["", *filter(None, [busy_note(conditions["busy_cores"])]), last]))
    return bench_prompts.check_promises(results.rows)


def _print_tables(rows: Sequence[Row], plan: BenchPlan, price_per_hour: float | None) -> None:
    from parlay.bench.summary import summarise
    from parlay.bench.table import readme_table, table

    summaries = summarise(rows, plan.cells())
    print(table(summaries, price_per_hour))
    if plan.against:
        print(f"\n{readme_table(summaries)}")


def _with_progress(bench: Bench) -> int:
    """Run to the end, or until a signal; returns 0, or the exit code."""
    from parlay.system.progress import Ticker

    with Ticker(bench.left, "parlay bench", "row") as ticker:
        try:
            bench.run(ticker.step)
        except KeyboardInterrupt as interrupt:
            return code_of(interrupt)
    return 0


def _command(options: argparse.Namespace) -> str:
    """The command line that repeats the run, without local folders."""
    words = ["parlay", "bench"]
    for name, value in vars(options).items():
        flag = "--" + name.replace("_", "-")
        if name in ("out", "fresh", "files") or value is None or value is False:
            continue
        if value is True:
            words.append(flag)
            continue
        texts = [str(each) for each in value] if isinstance(value, tuple) else str(value).split(",")
        words += [flag, ",".join(_without_folders(text) for text in texts)]
    return shlex.join(words)


def _without_folders(text: str) -> str:
    name, equals, place = text.rpartition("=")
    return f"{name}{equals}{Path(place).resolve().name}" if Path(place).exists() else text
