"""Options of the recipes that train canvas models, and causal models that draft blocks for themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parlay.options import Options, UsageError, option
from parlay.train.lm_model import SHAPES
from parlay.train.optimizers import AUTO, PRECISIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasTrainOptions(Options):
    """Options that all these recipes share: the texts, and the length of the run."""

    data: Path = option(
        help="what to learn from: a folder of text files (.txt, .md, ...), or JSON lines "
        '{"prompt": TEXT, "answer": TEXT} in a file or folder'
    )
    out: Path = option(Path("canvas-model"), "folder of the finished model")
    minutes: float = option(30.0, "how long to train", low=0.001)
    updates: int = option(0, "so many updates of the weights, whatever time they take; 0: --minutes", low=0)
    rows: int = option(16, "rows of a batch", low=1, high=4096)
    length: int = option(
        256, "most tokens of a row: longer documents are cut, longer conversations left out", low=8, high=4096
    )
    precision: str = option(
        AUTO, "in what products are computed: auto is bfloat16 where that is quicker", choices=PRECISIONS
    )
    threads: int | None = option(None, "number of threads (default: one per usable core)", low=1)
    seed: int = option(0, "seed of weights, rows and masks", low=0)

    def share(self, updates: int, seconds: float) -> float:
        """Return how much of the run is done after this many updates and seconds: 0 at the start, 1 at the end."""
        return updates / self.updates if self.updates else seconds / (60 * self.minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MdlmTrainOptions(CanvasTrainOptions):
    """Options of `mdlm`: the model to start from, or a new one's size and vocabulary."""

    model: str = option("", "a model that fills canvases to train further, by folder; empty: a new one")
    shape: str = option("mini", "size of a new model", choices=sorted(SHAPES))
    vocab_size: int = option(4096, "tokens of a new model's vocabulary, the mask among them", low=258, high=65_535)
    rate: float = option(1.0, "learning rates, in those of parlay train lm", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bd3TrainOptions(MdlmTrainOptions):
    """Options of `bd3`: those of `mdlm`, the block size, and the range of mask rates."""

    block: int = option(8, "places of a block", low=2, high=1024)
    low: float = option(0.0, "least share of a block that is masked", low=0, high=1)
    high: float = option(1.0, "largest share of a block that is masked", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTrainOptions(CanvasTrainOptions):
    """Options of recipes that train an existing model further: which model, how fast, and how many layers."""

    model: str = option("parlay-mini", "the model that is trained further, by name or folder")
    rate: float = option(1e-4, "peak learning rate (AdamW)", low=0)
    layers: int = option(0, "last layers that are trained; 0: all, and the embedding", low=0, high=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBlockTrainOptions(TunedTrainOptions):
    """Options of `set-block`: the canvas, the weights of its losses, the adapter, and the mask token."""

    model: str = option(
        "parlay-mini", "the model that is trained further, by name or folder; empty: a new one, of --shape"
    )
    shape: str = option("mini-draft", "size of a new model", choices=sorted(SHAPES))
    vocab_size: int = option(4096, "tokens of a new model's vocabulary, the mask among them", low=258, high=65_535)
    rate: float = option(1e-4, "peak learning rate (AdamW); of a new model in those of parlay train lm, say 1", low=0)
    block: int = option(8, "places of a canvas", low=2, high=256)
    text_weight: float = option(0.0, "weight of the texts' own tokens, in the text and on canvases", low=0)
    keep: float = option(
        1.0, "weight of the model's own distributions as they were, in the text, which so stays, and on canvases", low=0
    )
    lora: int = option(
        0, "rank of an adapter for mask rows, which leaves the model as it is; 0: train the model", low=0, high=512
    )
    groups: int = option(
        32, "--lora: canvases that begin in each row, after places that are drawn from its answer", low=1, high=1024
    )
    top_vocab: int = option(
        0, "--lora: learn over so many tokens, those that the answers have most often; 0: all", low=0
    )
    mask_token: str = option(
        "", "token that stands in open places; empty: an unused id, or the token of a byte that no text has"
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not (self.keep or self.text_weight):
            raise UsageError("keep=0 and text_weight=0: nothing would be learned; set one of them above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CllmTrainOptions(TunedTrainOptions):
    """Options of `cllm`: how the model's own texts are written, and the blocks it is trained to solve."""

    block: int = option(16, "tokens that are solved together", low=2, high=256)
    prompts: int = option(256, "rows whose prompts, or first halves, the model answers first", low=1)
    blocks: int = option(6, "blocks of each answer at most", low=1, high=256)
    groups: int = option(8, "blocks that are solved from drawn places of an answer", low=1, high=1024)
    keep: float = option(1.0, "weight of the model's own distributions as they were, in texts, which so stay", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CdlmTrainOptions(CanvasTrainOptions):
    """Options of `cdlm`: the teacher, and the weights of the losses, whose defaults are not the paper's."""

    model: str = option(help="the teacher, whose places all see each other, by folder: parlay train mdlm makes one")
    block: int = option(8, "places of a block of the student", low=2, high=1024)
    prompts: int = option(512, "prompts that the teacher answers", low=2)
    rate: float = option(3e-4, "peak learning rate (AdamW)", low=0)
    distill: float = option(1.0, "weight of the teacher's distributions", low=0)
    consistency: float = option(0.5, "weight of predictions that stay as a block is filled", low=0)
    denoise: float = option(0.1, "weight of the texts themselves", low=0)

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not (self.distill or self.consistency or self.denoise):
            raise UsageError("distill, consistency and denoise are 0: nothing would be learned; set one above 0")
