"""`parlay demo`: see `parlay.cli.race`."""

from __future__ import annotations

import argparse
import sys

from parlay.cli import FAILURE
from parlay.cli.flags import add_model_flags, add_tokenizer_flag, options_from
from parlay.options import LoadOptions

BUILT_IN = "parlay-mini"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_tokenizer_flag(parser)


def run(options: argparse.Namespace) -> int:
    from parlay.cli.race import demonstrate  # here, as it imports torch and transformers
    from parlay.llm.llm import LLM
    from parlay.models.fetch.pulled import NotPulled, named_or_default

    try:
        model = named_or_default(options.model)
    except NotPulled as error:
        model = BUILT_IN
        print(f"{error}\nUsing {BUILT_IN} instead, a tiny test model: its speeds are not typical.", file=sys.stderr)
    with LLM(model, tokenizer=options.tokenizer, load=options_from(LoadOptions, options)) as llm:
        if demonstrate(llm, sys.stdout):
            return 0
    print("parlay: error: an exact strategy gave another text than plain decoding: please report it", file=sys.stderr)
    return FAILURE
