"""Options of `parlay train` for translators, and the sizes of new ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from parlay.options import Options, option
from parlay.train.lm_model import SHAPES, Shape
from parlay.train.translation.pairs import LENGTHS
from parlay.types import FieldError

CONTEXT = 512


class TranslatorShape(NamedTuple):
    """The sizes of a translator. ``shallow``: how many of the last layers an answer's tokens run through; 0: all."""

    sizes: Shape
    shallow: int = 0


TRANSLATORS: Mapping[str, TranslatorShape] = MappingProxyType(
    {
        "base": TranslatorShape(Shape(hidden=384, layers=8, heads=6, kv_heads=3, head_dim=64, ffn=1152)),
        "small": TranslatorShape(Shape(hidden=256, layers=5, heads=4, kv_heads=2, head_dim=64, ffn=768)),
        "mini": TranslatorShape(Shape(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=384)),
        "deep-shallow": TranslatorShape(
            Shape(hidden=256, layers=7, heads=4, kv_heads=2, head_dim=64, ffn=768), shallow=1
        ),
        "drafter": TranslatorShape(Shape(hidden=192, layers=2, heads=3, kv_heads=1, head_dim=64, ffn=512)),
        "tiny": TranslatorShape(SHAPES["tiny"]),
        "tiny-shallow": TranslatorShape(SHAPES["tiny"], shallow=1),
    }
)
"""The sizes of new translators by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatorTrainOptions(Options):
    """Options of all translators: the pairs, the initial model, the teacher, and the length of the run."""

    data: Path = option(
        help="file of pairs: a source, a tab and its translation on each line; may be compressed as .zst"
    )
    out: Path = option(Path("translator"), "folder of the finished model")
    minutes: float = option(60.0, "minutes to train", low=0.001)
    updates: int = option(
        0, "stop after this many updates of the weights, whatever time they take; 0: after --minutes", low=0
    )
    shape: str = option("small", "size of a new model", choices=tuple(TRANSLATORS))
    vocab_size: int = option(4096, "size of a new vocabulary, including special tokens", low=512, high=65_536)
    batch_tokens: int = option(4096, "tokens in a batch, including sources and padding", low=8)
    longest: int = option(
        60, "leave out pairs with more tokens than this in source or translation", low=1, high=LENGTHS - 1
    )
    init: Path | None = option(None, "folder of a translator to train further, with its vocabulary")
    deepen: int = option(
        0, "new layers to insert after each layer of the model in --init; they add nothing at first", low=0
    )
    rate: float = option(
        1.0, "factor on the usual learning rates; to train a model further, take 0.1 to 0.3", low=0.001
    )
    seed: int = option(0, "seed of weights and batches", low=0)
    threads: int = option(0, "CPU threads; 0: torch chooses", low=0)
    compile: bool = option(True, "compile the layers if there is a C++ compiler")
    teacher: Path | None = option(
        None,
        "folder of a translator: train on its translations of the sources instead of the file's (sequence-level "
        "distillation)",
    )
    distilled: int = option(0, "number of sources that the teacher translates; 0: all", low=0)
    work: Path = option(Path("translation-work"), "folder of the teacher's translations, which later runs use again")

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.deepen and self.init is None:
            raise FieldError("deepen", f"={self.deepen} adds layers to an existing translator: name it by init", "init")
        if self.distilled and self.teacher is None:
            raise FieldError(
                "distilled", f"={self.distilled} counts translations by another model: name it by teacher", "teacher"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasTranslatorTrainOptions(TranslatorTrainOptions):
    """Options of translators that write in parallel: only those of all translators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CmlmTrainOptions(CanvasTranslatorTrainOptions):
    """Options of `cmlm`: how much the model is trained to draft, and how many tokens at once."""

    drafts: float = option(0.3, "share of pairs that train it to continue an answer, as a drafter does", low=0, high=1)
    block: int = option(8, "places that it fills when it drafts", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadTrainOptions(CanvasTranslatorTrainOptions):
    """Options of `gad`: how many tokens the model drafts at once."""

    block: int = option(8, "places that it drafts", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class NatTrainOptions(CanvasTranslatorTrainOptions):
    """Options of `nat`: whether fertilities or the length decide what the places read."""

    fertilities: bool = option(
        True, "predict how many answer tokens each source token stands for; else predict the length alone"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GlancingTrainOptions(CanvasTranslatorTrainOptions):
    """Options of `glat`: how many tokens are shown in training."""

    ratio: float = option(0.5, "tokens shown per wrong one at the start; falls to 0.1", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesTrainOptions(CanvasTranslatorTrainOptions):
    """Options of `ctc`: the size of canvases."""

    scale: int = option(3, "frames for each token of the source", low=1, high=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTrainOptions(GlancingTrainOptions):
    """Options of `da`: those of `glat`, the size of graphs, and how vertices are linked."""

    scale: int = option(4, "vertices for each token of the source", low=2, high=16)
    heads: int = option(4, "heads of the attention that links vertices; 0: link by distance only", low=0, high=16)
