"""`parlay train lm`: the flags are the trainer's own options."""

from __future__ import annotations

import argparse

from parlay.types import ParlayError

try:
    from parlay.train.arguments import add_arguments as add_option_flags
    from parlay.train.arguments import options_from
    from parlay.train.lm import train
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == "parlay":
        raise
    raise ParlayError(f"training needs {error.name}: pip install 'parlay[train]'") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("lm",), help="lm: a language model, from a directory of text")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add_option_flags(parser)


def run(options: argparse.Namespace) -> int:
    print(train(options_from(options)))
    return 0
