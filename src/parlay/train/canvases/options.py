"""Options of the recipes that train canvas models, and causal models that draft blocks for themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parlay.options import Options, option
from parlay.train.lm_model import SHAPES
from parlay.train.optimizers import AUTO, PRECISIONS
from parlay.types import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasTrainOptions(Options):
    """Options that all these recipes share: the texts, and the length of the run."""

    data: Path = option(
        help="what to train on: a folder of text files (.txt, .md, ...), or JSON lines "
        '{"prompt": TEXT, "answer": TEXT} in a file or folder'
    )
    out: Path = option(Path("canvas-model"), "folder of the finished model")
    minutes: float = option(30.0, "minutes to train", low=0.001)
    updates: int = option(
        0, "stop after this many updates of the weights, whatever time they take; 0: after --minutes", low=0
    )
    rows: int = option(16, "rows in a batch", low=1, high=4096)
    length: int = option(
        256, "longest row in tokens: longer documents are cut, longer conversations left out", low=8, high=4096
    )
    precision: str = option(
        AUTO, "number type of matrix products: auto is bfloat16 where that is faster", choices=PRECISIONS
    )
    threads: int | None = option(None, "number of threads (default: one per usable core)", low=1)
    seed: int = option(0, "seed of weights, rows and masks", low=0)

    def share(self, updates: int, seconds: float) -> float:
        """Return how much of the run is done after this many updates and seconds: 0 at the start, 1 at the end."""
        return updates / self.updates if self.updates else seconds / (60 * self.minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MdlmTrainOptions(CanvasTrainOptions):
    """Options of `mdlm`: the model to start from, or a new one's size and vocabulary."""

    model: str = option("", "folder of a model that fills canvases, to train it further; empty: a new model")
    shape: str = option("mini", "size of a new model", choices=sorted(SHAPES))
    vocab_size: int = option(4096, "size of a new model's vocabulary, including the mask", low=258, high=65_535)
    rate: float = option(1.0, "factor on the learning rates of parlay train lm", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bd3TrainOptions(MdlmTrainOptions):
    """Options of `bd3`: those of `mdlm`, the block size, and the range of mask rates."""

    block: int = option(8, "places in a block", low=2, high=1024)
    low: float = option(0.0, "smallest share of a block that is masked", low=0, high=1)
    high: float = option(1.0, "largest share of a block that is masked", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTrainOptions(CanvasTrainOptions):
    """Options of recipes that train an existing model further: which model, how fast, and how many layers."""

    model: str = option("parlay-mini", "the model to train further, by name or folder")
    rate: float = option(1e-4, "peak learning rate (AdamW)", low=0)
    layers: int = option(0, "train only this many last layers; 0: all layers and the embedding", low=0, high=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBlockTrainOptions(TunedTrainOptions):
    """Options of `set-block`: the canvas, the weights of its losses, the adapter, and the mask token."""

    model: str = option("parlay-mini", "the model to train further, by name or folder; empty: a new one of --shape")
    shape: str = option("mini-draft", "size of a new model", choices=sorted(SHAPES))
    vocab_size: int = option(4096, "size of a new model's vocabulary, including the mask", low=258, high=65_535)
    rate: float = option(
        1e-4, "peak learning rate (AdamW); for a new model, factor on the rates of parlay train lm, such as 1", low=0
    )
    block: int = option(8, "places on a canvas", low=2, high=256)
    text_weight: float = option(0.0, "weight of the texts' own tokens as labels, in the text and on canvases", low=0)
    keep: float = option(
        1.0,
        "weight of the original model's distributions as labels, on canvases and in the text, which preserves how it "
        "writes",
        low=0,
    )
    lora: int = option(
        0, "rank of an adapter for mask rows; the model itself then stays; 0: train the model", low=0, high=512
    )
    groups: int = option(
        32, "with --lora: canvases per row, which begin at random places of its answer", low=1, high=1024
    )
    top_vocab: int = option(
        0, "with --lora: the loss covers this many tokens, the most frequent in answers; 0: all", low=0
    )
    mask_token: str = option(
        "", "token of masked places; empty: an unused id, or the token of a byte that no text contains"
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not (self.keep or self.text_weight):
            raise FieldError("keep", "=0 and text_weight=0: nothing would be learned; set one above 0", "text_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class CllmTrainOptions(TunedTrainOptions):
    """Options of `cllm`: how the model's own texts are written, and the blocks it is trained to solve."""

    block: int = option(16, "tokens in a block, which Jacobi iteration solves together", low=2, high=256)
    prompts: int = option(
        256, "number of rows whose prompts, or first halves, the model answers before training", low=1
    )
    blocks: int = option(6, "most blocks in each of these answers", low=1, high=256)
    groups: int = option(8, "blocks per answer to train on, which begin at random places", low=1, high=1024)
    keep: float = option(
        1.0, "weight of the original model's distributions in texts, which preserves how it writes", low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CdlmTrainOptions(CanvasTrainOptions):
    """Options of `cdlm`: the teacher, and the weights of the losses, whose defaults are not the paper's."""

    model: str = option(help="folder of the teacher, a masked diffusion model such as parlay train mdlm makes")
    block: int = option(8, "places in a block of the student", low=2, high=1024)
    prompts: int = option(512, "number of prompts that the teacher answers", low=2)
    rate: float = option(3e-4, "peak learning rate (AdamW)", low=0)
    distill: float = option(1.0, "weight of the teacher's distributions", low=0)
    consistency: float = option(0.5, "weight of the student's own later predictions as labels", low=0)
    denoise: float = option(0.1, "weight of the original texts as labels", low=0)

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not (self.distill or self.consistency or self.denoise):
            raise FieldError(
                "distill",
                ", consistency and denoise are 0: nothing would be learned; set one above 0",
                "consistency",
                "denoise",
            )
