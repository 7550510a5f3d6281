"""`parlay prune`: writes a smaller model without training: zeros by a text, narrower layers, fewer layers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.opening import read_text
from parlay.options import UsageError

if TYPE_CHECKING:
    from parlay.models.config import DecoderConfig
    from parlay.models.pruning.prune import Cut
    from parlay.models.weights.shapes import Weight


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or a name that parlay models lists")
    parser.add_argument("--to", required=True, type=Path, metavar="DIR", help="the folder to write, in bfloat16")
    parser.add_argument(
        "--pattern",
        metavar="PATTERN",
        help="zeros of each row: a share such as 0.5, or N:M such as 2:4, where N of M neighbours stay",
    )
    parser.add_argument(
        "--method",
        default="wanda",
        choices=("wanda", "magnitude"),
        help="weights that become zero; wanda: those with the smallest product of weight and norm of its input on the "
        "text; magnitude: the smallest weights (default: wanda)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text like those that the model will read, for wanda; its first 8,192 tokens are read",
    )
    parser.add_argument(
        "--keep-layers",
        metavar="LAYERS",
        help="layers that stay, counted from 0, as in 0,1,2,21,22,23, or how many, evenly from first to last, as in 6",
    )
    parser.add_argument(
        "--keep-width", type=float, default=1.0, metavar="X", help="share of each feed-forward's inner units that stays"
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--threads", type=int, help="number of threads (default: one per usable core)")


def run(options: argparse.Namespace) -> int:
    cut = _checked(options)
    from tqdm import tqdm  # here, as help needs none of it

    from parlay.models.fetch.resolving import resolve
    from parlay.models.gguf.importance import ReadText
    from parlay.models.loading import load_tokenizer, load_weights, read_config
    from parlay.models.pruning.prune import check, pruned
    from parlay.models.pruning.saving import described, save
    from parlay.system import threads

    threads.settle(options.threads)
    source = resolve(options.model)
    config = read_config(source)
    config, weights = _fewer_layers(config, load_weights(source, config), options.keep_layers)
    text = None
    if options.text is not None:
        text = ReadText.of(read_text(str(options.text), "text"), load_tokenizer(source))
    check(config, weights, cut)
    fields = described(config, source)
    with tqdm(desc=options.to.name, unit=" layers", file=sys.stderr, disable=None, leave=False) as bar:

        def progress(done: int, layers: int) -> None:
            bar.total = layers
            bar.update(done - bar.n)

        config, made = pruned(config, weights, cut, text, progress)
    save(options.to, {**fields, "intermediate_size": config.intermediate_size}, made, source=source)
    zeros = sum(int((weight == 0).sum()) for weight in made.values())
    total = sum(weight.numel() for weight in made.values())
    size = f"{total / 1e6:,.1f} M weights in {config.num_layers} layers"
    print(f"wrote {options.to}: {size}, {zeros / total:.0%} of them zero")
    return 0


def _checked(options: argparse.Namespace) -> Cut:
    """Check the flags before the model is opened. Raises UsageError for what can't work."""
    from parlay.models.pruning.patterns import Pattern
    from parlay.models.pruning.prune import Cut

    pattern = None if options.pattern is None else Pattern.read(options.pattern)
    width: float = options.keep_width
    if not 0 < width <= 1:
        raise UsageError(f"--keep-width must be above 0 and at most 1, got {width:g}")
    scored = pattern is not None or width < 1
    if not scored and options.keep_layers is None:
        raise UsageError("nothing to prune: add --pattern, --keep-width or --keep-layers")
    if scored and options.method == "wanda" and options.text is None:
        raise UsageError("--method wanda needs a text: add --text FILE, or use --method magnitude")
    if options.text is not None and (options.method != "wanda" or not scored):
        raise UsageError("--text works only with --method wanda and --pattern or --keep-width: remove it")
    folder: Path = options.to
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--to must be a folder, but {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()) and not options.force:
        raise UsageError(f"--to {folder} is not empty: name another folder, or add --force to write into it")
    return Cut(pattern, width)


def _fewer_layers(
    config: DecoderConfig, weights: dict[str, Weight], asked: str | None
) -> tuple[DecoderConfig, dict[str, Weight]]:
    from dataclasses import replace

    from parlay.models.pruning.layers import evenly, only_layers, read_layers

    if asked is None:
        return config, weights
    layers = config.num_layers
    if asked.strip().isdecimal() and "," not in asked:
        count = int(asked)
        if not 0 < count <= layers:
            raise UsageError(
                f"--keep-layers must be between 1 and {layers}, the model's layers, or a list, got {count}"
            )
        kept = evenly(count, layers)
    else:
        kept = read_layers("--keep-layers", asked, layers)
    if config.layers:
        raise UsageError(f"--keep-layers: the layers of this {config.architecture} differ, so none can be removed")
    return replace(config, num_layers=len(kept)), only_layers(weights, kept)
