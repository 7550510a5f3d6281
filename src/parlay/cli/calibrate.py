"""`parlay calibrate`: tests lossy strategies against exact decoding on held-out prompts, and writes a certificate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.certificates.requirement import Floor
from parlay.cli import FAILURE
from parlay.cli.flags import (
    add_draft_flags,
    add_model_flags,
    add_option_flags,
    add_sampling_flags,
    add_tokenizer_flag,
    options_from,
    sampling_params,
    strategy,
    whole,
)
from parlay.cli.opening import open_llm
from parlay.options import LoadOptions
from parlay.system.user_cache import check_output
from parlay.types import SamplingParams

if TYPE_CHECKING:
    from parlay.bench.certify import Calibration, Ids
    from parlay.bench.workloads import Item
    from parlay.certificates.quality import Quality
    from parlay.llm.llm import LLM
    from parlay.strategies.spelling import StrategySpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "parlay plan --calibrate measures how fast this machine is."
    parser.add_argument(
        "prompts",
        type=Path,
        metavar="PROMPTS",
        help="prompts like those to come, drawn independently, and not used to choose the strategies: a line each, or "
        "JSON of any shape that parlay bench reads",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="certificate to write")
    parser.add_argument(
        "--strategy",
        type=strategy,
        action="append",
        default=[],
        dest="strategies",
        metavar="NAME[:KEY=VALUE,...]",
        help="lossy strategy; several are tested in this order until one fails, so name the safest first",
    )
    _add_fitting_flags(parser)
    parser.add_argument(
        "--quality",
        type=Path,
        metavar="FILE",
        help="instead of a strategy: quality.json of parlay bench --quality; what kept its quality on every task is "
        "tested, the least parallel first",
    )
    parser.add_argument(
        "--small",
        metavar="MODEL",
        help="instead of a strategy: a smaller model, which answers in place of --model where it is sure enough",
    )
    _add_decoding_flags(parser)


def _add_fitting_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for examples from which thresholds are learned, and for judging their answers."""
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="FILE",
        help="examples, other than PROMPTS, from which the thresholds of the one --strategy are learned first, for "
        "each kind of text: those of big-little, and of rule=rollback",
    )
    parser.add_argument(
        "--answer",
        dest="vote_answer",
        metavar="RULE",
        help="with --fit: an example's answer is good if it comes to the exact one's, where RULE finds it: number, "
        "boxed, or a regular expression (default: as --agreement says)",
    )


def _add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the number of prompts, the floor, and decoding."""
    parser.add_argument("--most", type=whole, default=1000, metavar="N", help="most prompts, the first (default: 1000)")
    add_option_flags(parser, Floor)
    add_model_flags(parser)
    add_tokenizer_flag(parser)
    add_draft_flags(parser, "small model for strategies that draft with one")
    add_sampling_flags(parser)
    parser.set_defaults(certificates=[], router_memory="off", max_model_len=None, memory=None)
    parser.set_defaults(prefix_cache=None, prefix_cache_size="1GiB")


def run(options: argparse.Namespace) -> int:
    floor, params = options_from(Floor, options), sampling_params(options)
    check_output(options.output)
    if [bool(options.strategies), options.small is not None, options.quality is not None].count(True) != 1:
        raise ValueError(
            "nothing to certify: add --strategy with lossy strategies, --quality with a file, or --small with a model"
        )
    if options.fit is not None and len(options.strategies) != 1:
        raise ValueError("--fit needs exactly one strategy: name it with --strategy")
    if options.vote_answer is not None and options.fit is None:
        raise ValueError("--answer has no effect without --fit: add --fit FILE, or remove it")
    from parlay.bench.certify import calibrate, check_request
    from parlay.bench.workloads import read_prompts
    from parlay.certificates.certificate import write
    from parlay.strategies.spelling import parse

    found = _candidates(options.quality) if options.quality is not None else None
    chosen = options.strategies if found is None else [parse(name) for name in found.candidates()]
    items = list(islice(read_prompts(options.prompts), options.most))
    check_request(floor, params, len(items))  # before the model is loaded
    if options.small is not None:
        return _cascade(options, items, floor, params)
    with open_llm(options, chosen[0]) as llm:
        if options.fit is not None:
            chosen = [_fitted(options, llm, chosen[0], floor, params, items=items)]
        if found is not None:
            found.check(llm.gate.binding(), options.quality)
            chosen = [each for each in chosen if each != llm.gate.reference]
        result = calibrate(llm, [_ids(llm, item) for item in items], chosen, floor, params)
    _tell(result, floor)
    if result.certificate is None:
        print(
            f"parlay: error: no strategy reached lossy:{floor}, so no certificate was written: lower the floor, "
            "or give more prompts",
            file=sys.stderr,
        )
        return FAILURE
    write(result.certificate, options.output)
    print(f"{options.output}: use it with --certificate {options.output} --exactness lossy:{floor}")
    return 0


def _fitted(
    options: argparse.Namespace,
    llm: LLM,
    strategy: StrategySpec,
    floor: Floor,
    params: SamplingParams,
    *,
    items: Sequence[Item],
) -> StrategySpec:
    """Learn the strategy's thresholds, and print them. Raises ValueError if an example is among ``items``."""
    from parlay.bench.fitting import fit, good_by_agreement, good_by_answer
    from parlay.bench.workloads import read_prompts
    from parlay.text.answers import check_rule

    if options.vote_answer is not None:
        check_rule(options.vote_answer)
    examples = [_ids(llm, item) for item in islice(read_prompts(options.fit), options.most)]
    tested = {tuple(_ids(llm, item)) for item in items}
    if again := sum(tuple(each) in tested for each in examples):
        raise ValueError(
            f"{again} of the examples of --fit are also among the prompts, so the test would prove nothing: give "
            "different files"
        )
    is_good = good_by_agreement(floor) if options.vote_answer is None else good_by_answer(options.vote_answer)
    found, learned = fit(llm, examples, strategy, floor, params, is_good=is_good)
    for one in learned:
        print(one.told(options.model))
    print(f"learned: --strategy {found}")
    return found


def _candidates(path: Path) -> Quality:
    """Read the result of `parlay bench --quality`. Raises ValueError if no strategy is worth a test."""
    from parlay.certificates.quality import read

    found = read(path)
    if not found.candidates():
        raise ValueError(f"no strategy in {path} reached the floor on every task: name one with --strategy")
    return found


def _cascade(options: argparse.Namespace, items: Sequence[Item], floor: Floor, params: SamplingParams) -> int:
    from parlay.bench.certify import calibrate_cascade
    from parlay.certificates.certificate import write
    from parlay.llm.llm import LLM

    load = options_from(LoadOptions, options)
    with open_llm(options, None) as large, LLM(options.small, load=load, router_memory="off") as small:
        prompts = [(_ids(small, item), _ids(large, item)) for item in items]
        cascade = calibrate_cascade(small, large, prompts, floor, params)
    if cascade is None:
        message = f"no answers of {options.small} are shown to keep lossy:{floor}; nothing is written"
        print(f"parlay: error: {message}", file=sys.stderr)
        return FAILURE
    write(cascade, options.output)
    found, answers = cascade.threshold, cascade.claim.answers
    print(
        f"{options.small} answers where it is sure to {found.least:g} or more: {found.by_small} of {answers} prompts; "
        f"{found.good} of {answers} answers are good\n{options.output}: use it with parlay serve --cascade "
        f"{options.output}, and requests to {options.model} of exactness lossy:{floor}"
    )
    return 0


def _ids(llm: LLM, item: Item) -> Ids:
    from parlay.bench.prepare import conversation_ids, text_ids

    return text_ids(llm, item.prompt) if item.prompt else conversation_ids(llm, item.messages)


def _tell(result: Calibration, floor: Floor) -> None:
    for one in result.shown:
        verdict = "certified" if one.certified else "not certified"
        print(
            f"{one.strategy}: {verdict}; {one.good} of {one.answers} answers are good (mean agreement "
            f"{one.mean_agreement:.3f}), so at least {one.bound:.1%} of such answers, with confidence "
            f"{floor.confidence:g}; {one.escaped} went on exactly; {one.speed:.2f} times the speed of exact decoding"
        )
