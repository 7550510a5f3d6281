"""`parlay train RECIPE`: the flags are the recipe's own options."""

from __future__ import annotations

import argparse

from parlay.cli.flags import add_config_flags, options_or_config
from parlay.heads.deferral import DEFER
from parlay.options import Options
from parlay.types import ParlayError

try:
    from parlay.train import defer, heads, lm, ngram_layers, scone
    from parlay.train.canvases import run as canvases
    from parlay.train.translation import training as translation
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] == "parlay":
        raise
    raise ParlayError(f"training needs {error.name}: pip install 'parlay[train]'") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    recipes = parser.add_subparsers(dest="kind", metavar="RECIPE", required=True)
    declared: dict[str, tuple[str, type[Options]]] = {
        "lm": ("train a language model on a folder of texts", lm.TrainOptions),
        "scone": ("train a language model that adds embeddings of frequent n-grams at its input", scone.SconeOptions),
        "ngram-layers": (
            "train a language model whose first layers are looked up by the last tokens",
            ngram_layers.NgramLayersOptions,
        ),
        "ngram-states": ("compute the table of a model of ngram-layers ahead", ngram_layers.NgramStatesOptions),
        DEFER: ("train a head that says which of two models writes the next token", defer.DeferTrainOptions),
    }
    declared |= {name: (method.summary, method.options) for name, method in heads.METHODS.items()}
    declared |= {name: (method.summary, method.options) for name, method in canvases.METHODS.items()}
    declared |= {name: (method.summary, method.options) for name, method in translation.METHODS.items()}
    for name, (summary, options) in declared.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        add_config_flags(recipes.add_parser(name, help=summary, description=description), options)


def run(options: argparse.Namespace) -> int:
    if options.kind == "lm":
        print(lm.train(options_or_config(lm.TrainOptions, options)))
    elif options.kind == DEFER:
        print(defer.train(options_or_config(defer.DeferTrainOptions, options)))
    elif options.kind == "scone":
        print(scone.train(options_or_config(scone.SconeOptions, options)))
    elif options.kind == "ngram-layers":
        print(ngram_layers.train(options_or_config(ngram_layers.NgramLayersOptions, options)))
    elif options.kind == "ngram-states":
        print(ngram_layers.compute_states(options_or_config(ngram_layers.NgramStatesOptions, options)))
    elif options.kind in canvases.METHODS:
        print(canvases.train(options.kind, options_or_config(canvases.METHODS[options.kind].options, options)))
    elif options.kind in translation.METHODS:
        method = translation.METHODS[options.kind]
        print(translation.train(options.kind, options_or_config(method.options, options)))
    else:
        print(heads.train(options.kind, options_or_config(heads.METHODS[options.kind].options, options)))
    return 0
