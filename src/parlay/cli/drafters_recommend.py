"""`parlay drafters recommend`: which strategy is quickest for a model on one's own prompts."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.flags import USUAL, add_model_flags, options_from
from parlay.options import LoadOptions
from parlay.system.terminal import aligned

if TYPE_CHECKING:
    from parlay.bench.recommend import Candidate
    from parlay.types import RunnerSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, USUAL)
    parser.set_defaults(model=None)
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="your prompts: a line each, or a .jsonl file of any shape that parlay bench reads",
    )
    parser.add_argument(
        "--strategies",
        metavar="NAMES",
        help="what to measure beside the registered drafters, joined by commas (default: all that need no training)",
    )
    parser.add_argument("--most", type=int, default=8, metavar="N", help="most prompts, the first ones (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="measurements of each of the best (default: 3)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    _check(options)
    from parlay.bench.presets import strategies  # here, because these load torch
    from parlay.bench.recommend import Trial, read_prompts, recommend, without_training
    from parlay.llm.llm import LLM
    from parlay.models.fetch.pulled import usual

    workload = read_prompts(options.prompts, options.most)
    others = strategies(options.strategies) if options.strategies else None
    model = options.model or usual()
    with LLM(model, load=options_from(LoadOptions, options)) as llm:
        own = _registered(model, llm.runner.spec)
        names = (*own, *(without_training(llm) if others is None else others))
        trial = Trial(names, workload, options.rounds, options.max_tokens, options.temperature)
        ranked = recommend(llm, trial, lambda done: print(done, file=sys.stderr))
    _print(options, model, ranked)
    return 0


def _check(options: argparse.Namespace) -> None:
    for flag, value in (("--most", options.most), ("--max-tokens", options.max_tokens), ("--rounds", options.rounds)):
        if value < 1:
            raise ValueError(f"{flag} {value}: give at least 1")
    if not 0 <= options.temperature <= 100:
        raise ValueError(f"--temperature {options.temperature}: give a number from 0 on")


def _registered(model: str, target: RunnerSpec) -> list[str]:
    """The strategies of all drafters on this machine that were trained for the target."""
    from parlay.drafters.heads.options import HEADS_OF_OTHERS, HeadOptions
    from parlay.heads.opening import heads_of
    from parlay.heads.store import drafters
    from parlay.strategies.catalogue import catalogue

    heads = heads_of(model, target, None)
    found = [each for each in drafters() if heads.fits(each)]
    names = [name for name, entry in catalogue().items() if issubclass(entry.options, HeadOptions)]
    return [
        f"{name}:head={each.name}"
        for each in found
        for name in names
        if HEADS_OF_OTHERS.get(name, name) == each.facts.method
    ]


def _print(options: argparse.Namespace, model: str, ranked: list[Candidate]) -> None:
    best = next((each.strategy for each in ranked if each.recommended), "none")
    if options.json:
        print(json.dumps({"model": model, "recommended": best, "strategies": [asdict(each) for each in ranked]}))
        return
    rows = [["strategy", "times plain", "rounds", "from-to", "tokens/step", "same texts"]]
    for each in ranked:
        if each.error or each.speed is None:
            rows.append([each.strategy, "-", "", "", "", each.error or "not measured"])
        else:
            spread = f"{each.low:.2f}-{each.high:.2f}"
            steps = f"{each.tokens_per_step:.2f}"
            same = f"{each.same} of {each.of}"
            rows.append([each.strategy, f"{each.speed:.2f}", str(each.rounds), spread, steps, same])
    print("\n".join(aligned(rows)))
    if best == "none":
        print("\nNothing was quicker than plain decoding: --strategy none")
    else:
        print(f"\nUse it: parlay generate --model {model} --strategy {best}")
