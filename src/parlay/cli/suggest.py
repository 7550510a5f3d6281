"""`parlay suggest`: writes several continuations in the time of one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from parlay.cli.flags import add_model_flags, add_tokenizer_flag, options_from, whole
from parlay.cli.generate import prompt_text
from parlay.cli.parser import unicode_text
from parlay.options import LoadOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt",
        nargs="?",
        type=unicode_text,
        metavar="PROMPT",
        help="text to continue (default: read from standard input)",
    )
    parser.add_argument("--file", metavar="FILE", help="take the text of this file as the prompt")
    parser.add_argument("-n", type=whole, default=3, metavar="N", help="how many drafts (default: 3)")
    parser.add_argument("--max-tokens", type=whole, default=16, metavar="N", help="most tokens of each (default: 16)")
    parser.add_argument(
        "--stop",
        action="append",
        type=unicode_text,
        default=[],
        metavar="TEXT",
        help="a draft ends before this text; may be given again",
    )
    parser.add_argument(
        "--ngrams", type=Path, metavar="FILE", help="n-gram model of such texts, which tells which words go together"
    )
    parser.add_argument(
        "--alpha", type=float, default=0.54, help="weight of the n-gram model beside the model, 0 to 1 (default: 0.54)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_flags(parser)
    add_tokenizer_flag(parser)


def run(options: argparse.Namespace) -> int:
    prompt = prompt_text(options)
    from parlay.llm.llm import LLM  # here, as help needs none of it
    from parlay.llm.suggesting import SuggestParams
    from parlay.types import SamplingParams

    asked = SamplingParams(n=options.n, max_tokens=options.max_tokens, stop=options.stop)
    params, load = SuggestParams(alpha=options.alpha), options_from(LoadOptions, options)
    with LLM(options.model, tokenizer=options.tokenizer, load=load, strategy="none", router_memory="off") as llm:
        (output,) = llm.suggest(prompt, asked, params, ngrams=options.ngrams)
    drafts = [{"text": each.text, "finish_reason": each.finish_reason} for each in output.outputs]
    if options.json:
        print(json.dumps({"prompt": prompt, "drafts": drafts}))
        return 0
    for place, each in enumerate(output.outputs, 1):
        print(f"{place}: {each.text}")
    metrics = output.metrics
    print(f"{len(drafts)} drafts in {metrics.steps} steps, {metrics.seconds:.2f} s; lossy", file=sys.stderr)
    return 0
