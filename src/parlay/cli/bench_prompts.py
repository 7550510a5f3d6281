"""`parlay bench PROMPTS`: which strategy is best for your prompts, and how certain that is."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli import FAILURE
from parlay.cli.flags import options_from
from parlay.options import LoadOptions
from parlay.system.terminal import aligned, counted

if TYPE_CHECKING:
    from parlay.bench.records import Results, Row
    from parlay.bench.trial import Candidate, Trial, TrialResult
    from parlay.bench.workloads import Item
    from parlay.llm.llm import LLM

MINUTES = 5.0
PROMPTS, MAX_TOKENS, ROUNDS = 32, 128, 3
MEANINGLESS: Mapping[str, object] = {
    "workloads": None,
    "preset": None,
    "data": None,
    "against": None,
    "price_per_hour": None,
    "keep_loops": False,
    "replay": None,
    "tokenizer": None,
    "cost_model": None,
    "cost_table": None,
    "forwards": False,
}
"""Flags that are not used with files of prompts, and their defaults."""


def run(options: argparse.Namespace, files: list[Path]) -> int:
    """Compare strategies on the prompts in ``files``, and print a table and a recommendation."""
    began = time.monotonic()
    _check(options)
    _check_files(files)
    from parlay.bench.presets import strategies  # here, as these import torch
    from parlay.bench.trial import run as race
    from parlay.bench.trial import usual_strategies
    from parlay.bench.workloads import read_prompts
    from parlay.llm.llm import LLM
    from parlay.models.fetch.pulled import named_or_default
    from parlay.strategies.spelling import all_with_effort
    from parlay.system.progress import Ticker, above_bars

    prompts = tuple(islice((item for file in files for item in read_prompts(file)), options.prompts or PROMPTS))
    named = strategies(options.strategies) if options.strategies is not None else None
    if named is not None and set(named) <= {"none"}:
        raise ValueError(
            "--strategies none: plain decoding is always measured too: name another strategy, or remove it"
        )
    model = named_or_default(options.model)
    with ExitStack() as stack:
        load = options_from(LoadOptions, options)
        llm = stack.enter_context(LLM(model, load=load, draft_model=options.draft_model, router_memory="off"))
        chosen = named or usual_strategies(llm, _registered(llm, model))
        if options.effort is not None:
            chosen = all_with_effort(chosen, options.effort)
        trial = _trial(options, tuple(each for each in chosen if each != "none"), prompts, began)
        results = _results(options, llm, stack)
        ticker = stack.enter_context(Ticker(len(prompts) * trial.rounds, "parlay bench", "prompt"))
        found = race(llm, trial, results, above_bars, lambda note: ticker.step(note=note))
    if options.json:
        print(json.dumps(_document(model, found)))
    else:
        print("\n".join([*_table(found), "", *_verdict(found, model)]))
    return check_promises(results.rows)


def _check(options: argparse.Namespace) -> None:
    flags = vars(options)
    for name, usual in MEANINGLESS.items():
        if flags.get(name, usual) != usual:
            raise ValueError(f"--{name.replace('_', '-')} can't be used with files of prompts: remove one of them")
    for name in ("concurrency", "temperature", "context"):
        if len(flags[name]) > 1:
            raise ValueError(f"--{name} {','.join(map(str, flags[name]))}: give one value with files of prompts")
    if flags["concurrency"] != (1,) or flags["context"] != (0,):
        raise ValueError("--concurrency and --context can't be used with files of prompts: remove them")


def _check_files(files: list[Path]) -> None:
    for file in files:
        if not file.exists() or file.is_dir() or file.suffix == ".gguf":
            raise ValueError(
                f"can't read {file}: it is not a file of prompts: to measure a model, write --model {file}"
            )


def _trial(options: argparse.Namespace, strategies: tuple[str, ...], prompts: tuple[Item, ...], began: float) -> Trial:
    from parlay.bench.trial import Trial

    return Trial(
        strategies=strategies,
        prompts=prompts,
        minutes=options.minutes or MINUTES,
        rounds=options.rounds or ROUNDS,
        max_tokens=options.max_tokens or MAX_TOKENS,
        temperature=options.temperature[0],
        began=began,
    )


def _results(options: argparse.Namespace, llm: LLM, stack: ExitStack) -> Results:
    """Open the results: a new file ``--out``, or a temporary one."""
    from parlay.bench.host import busy_cores, busy_note
    from parlay.bench.provenance import provenance
    from parlay.bench.records import Results

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="parlay-bench-"))
    spec = llm.runner.spec
    busy = busy_cores()
    if note := busy_note(busy):
        print(f"parlay: {note}", file=sys.stderr)
    more = {"dtype": spec.dtype, "device": spec.device, "kernels": spec.kernels, "busy_cores": busy}
    header = provenance("parlay bench PROMPTS", more)
    return Results(options.out or Path(folder) / "rows.jsonl", header, fresh=True)


def _registered(llm: LLM, model: str) -> list[str]:
    """The strategies of all local drafters that were trained for the model."""
    from parlay.drafters.options import HEADS_OF_OTHERS, HeadOptions
    from parlay.heads.opening import heads_of
    from parlay.heads.store import drafters
    from parlay.strategies.catalogue import catalogue

    heads = heads_of(model, llm.runner.spec, None)
    names = [name for name, entry in catalogue().items() if issubclass(entry.options, HeadOptions)]
    return [
        f"{name}:head={each.name}"
        for each in drafters()
        for name in names
        if heads.fits(each) and HEADS_OF_OTHERS.get(name, name) == each.facts.method
    ]


def check_promises(rows: Sequence[Row]) -> int:
    """Return the exit code, and print a line on standard error for each cell whose text breaks its level's promise."""
    from parlay.types import Exactness

    broken = [row.cell for row in rows if row.exactness == Exactness.BITS and row.same < row.of]
    for cell in dict.fromkeys(broken):
        print(
            f"parlay: error: {cell.strategy} on {cell.workload} gave another text than plain decoding, which it must "
            "not: please report it",
            file=sys.stderr,
        )
    return FAILURE if broken else 0


# ----------------------------------------------------------------------------------------------------------- output


def _document(model: str, found: TrialResult) -> dict[str, object]:
    return {
        "model": model,
        "recommended": found.best.strategy if found.best else "none",
        "plain_tokens_per_second": found.plain,
        "strategies": [asdict(each) for each in found.candidates],
        "left_out": found.left_out,
        "prompts_lacking": found.lacking,
    }


def _table(found: TrialResult) -> list[str]:
    from parlay.bench.report.markdown import bounds

    head = ["strategy", "tokens/s", "times plain", "95 %", "whole", "prompts", "rounds", "tokens/step", "same texts"]
    rows = [head, ["none", f"{found.plain:.1f}", "1", "", "1", "", "", "1.00", ""]]
    for each in found.candidates:
        if each.error or each.speed is None:
            rows.append([each.strategy, "-", "-", "", "", "", "", "", each.error or "not measured"])
            continue
        interval = "-" if each.low is None or each.high is None else bounds(each.low, each.high)
        whole = "-" if each.whole is None else f"{each.whole:.2f}"
        counts = [str(each.prompts), str(each.rounds), f"{each.tokens_per_step:.2f}"]
        same = f"{each.same} of {each.of}" if each.of else "not promised"
        speeds = [f"{each.tokens_per_second:.1f}", f"{each.speed:.2f}", interval, whole]
        rows.append([each.strategy, *speeds, *counts, same])
    left = [f"Left out, for want of time (--minutes): {', '.join(found.left_out)}"] if found.left_out else []
    return [*aligned(rows, 1), *left]


def _verdict(found: TrialResult, model: str) -> list[str]:
    """A sentence that recommends a strategy, and the command to use it."""
    from parlay.strategies.entry import DEFAULT_STRATEGY

    best = found.best
    if best is not None:
        flag = (
            "remove --strategy: it is the default"
            if best.strategy == DEFAULT_STRATEGY
            else (f"write --strategy {shlex.quote(best.strategy)}")
        )
        return [f"Take {best.strategy}: {_how_fast(best)}. To use it, {flag}."]
    sound = [each for each in found.candidates if each.sound]
    untried = any(each.speed is None and not each.error for each in found.candidates)
    if not sound and not untried:
        return ["No strategy could be measured: write --strategy none."]
    if found.lacking:
        return [_too_few(found)]
    usual = next((each for each in sound if each.strategy == DEFAULT_STRATEGY), None)
    slower = usual is not None and usual.high is not None and usual.high < 1
    flag = "write --strategy none" if slower else "remove --strategy: the default drafts only where it pays"
    return [
        f"Nothing is surely quicker than plain decoding; the best is {sound[0].strategy}, {_how_fast(sound[0])}. "
        f"So {flag}."
    ]


def _too_few(found: TrialResult) -> str:
    """Say what is missing for a recommendation, and what to do meanwhile."""
    from parlay.bench.trial import ENOUGH

    more = "give more time (--minutes)" if found.unreached else f"give {found.lacking} more"
    return (
        f"Too few prompts for a recommendation: {ENOUGH - found.lacking} of {ENOUGH} could be timed, so {more}. "
        "Until then remove --strategy: the default drafts only where it pays."
    )


def _how_fast(each: Candidate) -> str:
    rounds = counted(each.rounds, "round")
    whole = "" if each.whole is None else f", {each.whole:.2f} times with the prompt's time"
    interval = f"95 % interval {each.low:.2f} to {each.high:.2f}, from {each.prompts} prompts, {rounds}"
    return f"{each.speed:.2f} times as fast as plain decoding{whole} ({interval})"
