"""Measures models after one-shot pruning: perplexity, and how often they predict the whole model's likeliest token.

    python -m benchmarks.sparsity.accuracy --model MODEL --text FILE --heldout FILE

A prediction that equals the whole model's likeliest token is a draft token that a greedy target accepts. Wanda reads
``--text``; the figures are measured on ``--heldout``. They do not depend on the machine's load.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.commands import one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import table
from benchmarks.sparsity.products import AT_ONCE, GROUP
from parlay import models
from parlay.models.config import DecoderConfig
from parlay.models.fetch.resolving import resolve
from parlay.models.gguf.importance import ReadText
from parlay.models.loading import load_tokenizer, load_weights, read_config
from parlay.models.pruning.layers import evenly, only_layers
from parlay.models.pruning.patterns import Pattern
from parlay.models.pruning.prune import Cut, pruned
from parlay.models.pruning.saving import described, save
from parlay.models.weights.shapes import Weight
from parlay.system import threads
from parlay.types import Segment

CHUNK = 512


@dataclass(frozen=True, slots=True)
class Blocks(Pattern):
    """Sets whole blocks of 4 outputs and 32 inputs to zero, those with the least sum of scores: a product can skip
    them."""

    def applied(self, weight_OI: Tensor, scores_OI: Tensor) -> Tensor:
        outputs, inputs = weight_OI.shape
        blocks = scores_OI.view(outputs // AT_ONCE, AT_ONCE, inputs // GROUP, GROUP).sum((1, 3))
        lowest = blocks.flatten().argsort()[: round(self.zeros * blocks.numel())]
        kept = torch.ones(blocks.numel(), dtype=torch.bool).index_fill_(0, lowest, False).view_as(blocks)
        return weight_OI * kept.repeat_interleave(AT_ONCE, 0).repeat_interleave(GROUP, 1)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to prune: zeros, the share of inner units that stays, and that of layers. ``reads``: scores use a text
    (Wanda)."""

    pattern: str = ""
    reads: bool = False
    width: float = 1.0
    depth: float = 1.0
    blocks: bool = False

    @property
    def name(self) -> str:
        parts = [f"zeros {self.pattern}{' in blocks' if self.blocks else ''}"] if self.pattern else []
        parts += [f"width {self.width}"] if self.width < 1 else []
        parts += [f"layers {self.depth}"] if self.depth < 1 else []
        return ", ".join(parts)


ZEROS = [Variant(pattern, reads) for pattern in ("0.25", "0.5", "2:4") for reads in (False, True)]
ZEROS += [Variant(pattern, True, blocks=True) for pattern in ("0.25", "0.5")]
SMALLER = [
    *(Variant(width=width, reads=reads) for width in (0.9, 0.75) for reads in (False, True)),
    Variant(depth=0.84),
]


@dataclass(frozen=True, slots=True)
class Read:
    """A text as a model predicts it: the likeliest token after each token, and the mean loss in nats."""

    likeliest_N: Tensor
    nats: float


def pieces(text: ReadText) -> Iterator[list[int]]:
    """Yield a text in pieces, each after the tokens with which texts begin."""
    own = text.ids[len(text.begin) :]
    for first in range(0, len(own) - 1, CHUNK):
        yield [*text.begin, *own[first : first + CHUNK]]


def read(model: str, text: ReadText) -> Read:
    """Read a text in pieces, each from an empty cache."""
    runner = models.load(model, cache_tokens=2 * CHUNK)
    likeliest, nats = [], []
    for number, piece in enumerate(pieces(text)):
        runner.open(number, piece, salt=str(number))
        runner.reserve(number, len(piece))
        logits_NV = runner.forward([Segment(number, tuple(piece))]).logits_RV[:-1].float()
        runner.release(number)
        likeliest.append(logits_NV.argmax(-1))
        nats.append(torch.nn.functional.cross_entropy(logits_NV, torch.tensor(piece[1:]), reduction="none"))
    return Read(torch.cat(likeliest), float(torch.cat(nats).mean()))


def made(variant: Variant, source: Path, text: ReadText, folder: Path) -> Path:
    """Write the pruned model to a folder, and return the folder."""
    config: DecoderConfig = read_config(source)
    weights: dict[str, Weight] = load_weights(source, config)
    if variant.depth < 1:
        kept = evenly(round(variant.depth * config.num_layers), config.num_layers)
        weights = only_layers(weights, kept)
        config = replace(config, num_layers=len(kept))
    pattern = Pattern.read(variant.pattern) if variant.pattern else None
    if pattern is not None and variant.blocks:
        pattern = Blocks(pattern.text, pattern.zeros)
    config, tensors = pruned(config, weights, Cut(pattern, variant.width), text if variant.reads else None)
    save(folder, described(config, source), tensors, source=source)
    return folder


def rows(model: str, variants: Sequence[Variant], text: ReadText, heldout: ReadText) -> Iterator[Sequence[str]]:
    """Yield a table row for the whole model and for each variant."""
    whole, source = read(model, heldout), resolve(model)
    yield "the whole model", "", f"{torch.tensor(whole.nats).exp():.3f}", "1.000"
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder:
            own = read(str(made(variant, source, text, Path(folder) / "made")), heldout)
        same = float((own.likeliest_N == whole.likeliest_N).float().mean())
        by = "Wanda" if variant.reads else "" if not variant.pattern and variant.width == 1 else "size"
        yield variant.name, by, f"{torch.tensor(own.nats).exp():.3f}", f"{same:.3f}"


@one_line_errors("sparsity.accuracy")
def main() -> None:
    """Run the command."""
    parser = command_parser("sparsity.accuracy", __doc__)
    parser.add_argument("--model", default="parlay-mini", help="a folder, GGUF file or name")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="text that Wanda reads")
    parser.add_argument(
        "--heldout", required=True, type=Path, metavar="FILE", help="text on which the figures are measured"
    )
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="most tokens read of each text")
    parser.add_argument("--zeros-only", action="store_true", help="leave out the variants in width and depth")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    threads.settle(options.threads)
    tokenizer = load_tokenizer(resolve(options.model))
    variants = ZEROS if options.zeros_only else [*ZEROS, *SMALLER]
    text, heldout = (
        ReadText.of(file.read_text(encoding="utf-8"), tokenizer, options.tokens)
        for file in (options.text, options.heldout)
    )
    found = []
    for row in rows(options.model, variants, text, heldout):
        found.append(row)
        print(*row, sep=" | ", flush=True)
    print("\n".join(table(("pruned", "by", "perplexity", "same likeliest token"), found)))


if __name__ == "__main__":
    main()
