"""`parlay train RECIPE`: the flags are the recipe's own options, which are imported once the recipe is known."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from parlay.cli.flags import add_config_flags, options_or_config
from parlay.cli.parser import Parser, add_action
from parlay.drafters import options as methods
from parlay.types import UsageError


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a recipe's options are, and the function that trains by them, each written ``module:name``.

    ``named``: several recipes share the function, which is given the recipe's name first.
    """

    summary: str
    options: str
    train: str
    named: bool = False

    def options_class(self) -> Any:
        """Import the class of the options, which takes seconds."""
        return _imported(self.options)

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_config_flags(parser, self.options_class())


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return vars(import_module(module))[name]


_HEADS = "parlay.train.heads:train"
_MODELS = ("distill", methods.EARLY_EXIT)
"""The recipes of `_HEADS` that write a model, not a head."""


def _of_head(summary: str, options: str) -> Recipe:
    return Recipe(summary, f"parlay.train.options:{options}", _HEADS, named=True)


def _of_canvas(summary: str, options: str) -> Recipe:
    return Recipe(summary, f"parlay.train.canvases.options:{options}", "parlay.train.canvases.run:train", named=True)


def _of_translator(summary: str, options: str) -> Recipe:
    where = "parlay.train.translation"
    return Recipe(summary, f"{where}.options:{options}", f"{where}.training:train", named=True)


RECIPES: Mapping[str, Recipe] = {
    "lm": Recipe(
        "train a language model on a folder of texts", "parlay.train.lm:TrainOptions", "parlay.train.lm:train"
    ),
    "scone": Recipe(
        "train a language model that adds embeddings of frequent n-grams at its input",
        "parlay.train.scone:SconeOptions",
        "parlay.train.scone:train",
    ),
    "ngram-layers": Recipe(
        "train a language model whose first layers are looked up by the last tokens",
        "parlay.train.ngram_layers:NgramLayersOptions",
        "parlay.train.ngram_layers:train",
    ),
    "ngram-states": Recipe(
        "precompute the lookup table of a model of ngram-layers",
        "parlay.train.ngram_layers:NgramStatesOptions",
        "parlay.train.ngram_layers:compute_states",
    ),
    "defer": Recipe(
        "train a head that decides which of two models writes the next token",
        "parlay.train.defer:DeferTrainOptions",
        "parlay.train.defer:train",
    ),
    methods.BITA: _of_head("train BiTA's probes and their prefix for a target model", "BitaTrainOptions"),
    methods.BLOCK_DRAFTER: _of_head(
        "train a head that drafts a block in one forward for a target model", "BlockTrainOptions"
    ),
    methods.BLOCKWISE: _of_head(
        "train the heads of blockwise parallel decoding for a target model", "BlockwiseTrainOptions"
    ),
    "distill": _of_head("train a small model that drafts for a target model", "DistillTrainOptions"),
    methods.DYNAMO: _of_head("train DynaMo's heads for a target model", "DynamoTrainOptions"),
    methods.EARLY_EXIT: _of_head(
        "train a target model so that it can draft with its first layers", "EarlyExitTrainOptions"
    ),
    methods.EAGLE: _of_head(
        "train EAGLE's draft head for a target model; eagle2 drafts with it too", "EagleTrainOptions"
    ),
    methods.EAGLE3: _of_head("train an EAGLE-3 draft head for a target model", "Eagle3TrainOptions"),
    methods.HYDRA: _of_head("train Hydra's draft heads for a target model", "HydraTrainOptions"),
    methods.KANGAROO: _of_head("train Kangaroo's adapter for a target model", "KangarooTrainOptions"),
    methods.MEDUSA: _of_head("train Medusa's draft heads for a target model", "MedusaTrainOptions"),
    methods.MLP_SPECULATOR: _of_head("train IBM's MLP speculator for a target model", "MlpSpeculatorTrainOptions"),
    methods.MTP: _of_head("train a module of multi-token prediction for a target model", "MtpTrainOptions"),
    methods.PASS: _of_head("train PaSS's look-ahead embeddings for a target model", "ProbeTrainOptions"),
    methods.PPD: _of_head("train PPD's probes for a target model", "ProbeTrainOptions"),
    methods.REDRAFTER: _of_head("train a recurrent drafter for a target model", "ReDrafterTrainOptions"),
    methods.STREAMING: _of_head("train the streams of Speculative Streaming for a target model", "StreamTrainOptions"),
    "mdlm": _of_canvas("train a masked diffusion model", "MdlmTrainOptions"),
    "bd3": _of_canvas("train a block diffusion model", "Bd3TrainOptions"),
    methods.SET_BLOCK: _of_canvas(
        "train a causal model so that it fills masked places too, and drafts for itself", "SetBlockTrainOptions"
    ),
    "cdlm": _of_canvas(
        "train a student in blocks that fills more places at once than its diffusion teacher", "CdlmTrainOptions"
    ),
    "cllm": _of_canvas("train a causal model so that jacobi converges in few forwards", "CllmTrainOptions"),
    "translator": _of_translator("train a small translator that writes token by token", "TranslatorTrainOptions"),
    "gad": _of_translator(
        "train a translator that also drafts a block for another (aggressive decoding)", "AheadTrainOptions"
    ),
    "cmlm": _of_translator("train a translator that fills masks (Mask-Predict)", "CmlmTrainOptions"),
    "nat": _of_translator("train a translator that writes all tokens in one pass", "NatTrainOptions"),
    "glat": _of_translator(
        "train a one-pass translator that is shown some tokens while it learns", "GlancingTrainOptions"
    ),
    "ctc": _of_translator("train a one-pass translator with repeats and blanks (CTC)", "FramesTrainOptions"),
    "da": _of_translator("train a one-pass translator over a graph (DA-Transformer)", "GraphTrainOptions"),
}
_FOLDERS = ("out", "work")
"""The options of recipes that name folders to write to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    recipes = parser.add_subparsers(dest="kind", metavar="RECIPE", required=True, parser_class=Parser)
    for name, recipe in RECIPES.items():
        add_action(recipes, name, recipe.summary).add_later(recipe.add_flags)


def run(options: argparse.Namespace) -> int:
    recipe = RECIPES[options.kind]
    asked = options_or_config(recipe.options_class(), options)
    folders = {name: folder for name, folder in asdict(asked).items() if name in _FOLDERS}
    _check_out(options.kind, folders.get("out"))
    train = _imported(recipe.train)
    with _no_empty_folders(list(folders.values())):
        print(train(options.kind, asked) if recipe.named else train(asked))
    return 0


def _check_out(kind: str, out: Path | None) -> None:
    """Raises UsageError for a folder with files of something else than an earlier run of this recipe."""
    if out is None or not out.is_dir() or not any(out.iterdir()):
        return
    wanted = kind if RECIPES[kind].train == _HEADS and kind not in _MODELS else None
    try:
        method = json.loads((out / "config.json").read_text(encoding="utf-8")).get("method")
        ours = method == wanted if wanted else method not in RECIPES
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        what = f"{wanted} head" if wanted else "model"
        raise UsageError(f"--out {out} is not empty, and holds no {what}: name another folder")


@contextmanager
def _no_empty_folders(folders: Sequence[Path]) -> Iterator[None]:
    """If the block fails, remove those of the folders that it made and left empty, with their new parents."""
    new = [each for folder in folders for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        for each in new:
            with suppress(OSError):  # it is not empty
                each.rmdir()
        raise
