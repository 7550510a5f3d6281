"""`parlay demo`: see `parlay.cli.race`."""

from __future__ import annotations

import argparse
import sys

from parlay.cli import FAILURE
from parlay.cli.flags import USUAL, add_model_flags, add_tokenizer_flag, options_from
from parlay.options import LoadOptions

BUILT_IN = "parlay-mini"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser, USUAL)
    add_tokenizer_flag(parser)
    parser.set_defaults(model=None)


def run(options: argparse.Namespace) -> int:
    from parlay.cli.race import demonstrate  # here, because it loads torch and transformers
    from parlay.llm.llm import LLM
    from parlay.models.fetch.pulled import usual

    model = options.model or usual()
    if model == BUILT_IN:
        real = "`parlay pull smollm2-135m` brings a real one"
        print(f"{BUILT_IN} is a test model, and its speeds say little: {real}.", file=sys.stderr)
    with LLM(model, tokenizer=options.tokenizer, load=options_from(LoadOptions, options)) as llm:
        if demonstrate(llm, sys.stdout):
            return 0
    print("parlay: error: a strategy that promises the same text gave another; please report it", file=sys.stderr)
    return FAILURE
