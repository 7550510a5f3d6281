"""`parlay train lm`: the flags are the trainer's own options."""

from __future__ import annotations

import argparse

from parlay.cli.flags import add_option_flags, options_from
from parlay.types import ParlayError

try:
    from parlay.train.lm import TrainOptions, train
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == "parlay":
        raise
    raise ParlayError(f"training needs {error.name}: pip install 'parlay[train]'") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("lm",), help="lm: a language model, from a directory of text")
    add_option_flags(parser, TrainOptions)


def run(options: argparse.Namespace) -> int:
    print(train(options_from(TrainOptions, options)))
    return 0
