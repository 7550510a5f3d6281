"""`parlay train RECIPE`: the flags are the recipe's own options."""

from __future__ import annotations

import argparse

from parlay.cli.flags import add_option_flags, options_from
from parlay.drafters.heads.options import EAGLE3
from parlay.types import ParlayError

try:
    from parlay.train import heads, lm
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == "parlay":
        raise
    raise ParlayError(f"training needs {error.name}: pip install 'parlay[train]'") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    recipes = parser.add_subparsers(dest="kind", metavar="RECIPE", required=True)
    for name, summary, declared in (
        ("lm", "train a language model on a folder of texts", lm.TrainOptions),
        (EAGLE3, "train an EAGLE-3 draft head for a target model", heads.Eagle3TrainOptions),
    ):
        description = f"{summary[0].upper()}{summary[1:]}."
        add_option_flags(recipes.add_parser(name, help=summary, description=description), declared)


def run(options: argparse.Namespace) -> int:
    if options.kind == "lm":
        print(lm.train(options_from(lm.TrainOptions, options)))
    else:
        print(heads.train(options_from(heads.Eagle3TrainOptions, options)))
    return 0
