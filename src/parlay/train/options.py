"""What `parlay train` can be asked for when it trains a head, whichever the method."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parlay.options import option
from parlay.train.loop import LoopOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrainOptions(LoopOptions):
    """Which target, on what the head is trained, and how much it can draft."""

    model: str = option("smollm2-135m", "the target, by name, folder or GGUF file")
    out: Path = option(Path("head"), "folder of the finished head")
    work: Path = option(Path("heads-work"), "folder of texts, features and checkpoints; a killed run goes on from it")
    prompts: Path | None = option(
        None, 'file of JSON lines {"prompt": TEXT}; the target writes half of its own besides'
    )
    texts: Path | None = option(
        None,
        'file of JSON lines {"prompt": TEXT, "answer": TEXT} to learn from besides; reading is quicker than writing',
    )
    skip_broken: bool = option(False, "leave broken lines of these files out")
    shards: int = option(16, "shards of 128 conversations that the target writes", low=1)
    answer_tokens: int = option(192, "most tokens of an answer", low=2)
    draft_vocab: int = option(4096, "tokens that can be drafted: those that the target writes most", low=2)
    domain: str = option(
        "general", "kind of texts it is trained on, say code or dialogue: the name under which strategies find it"
    )
    licence: str = option("", "licence of what is trained, as SPDX names it; empty: the target's")
    whole: bool = option(True, "learn from the prompts too, not from answers alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleTrainOptions(HeadTrainOptions):
    """Nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpTrainOptions(HeadTrainOptions):
    """Which form the module has, and for how many tokens it is trained."""

    form: str = option(
        "sequential",
        "sequential: one block, used again for every depth (DeepSeek); parallel: a layer for each (Gloeckle et al.)",
        choices=("sequential", "parallel"),
    )
    steps: int = option(1, "depths that it is trained for; one block drafts further on its own states", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3TrainOptions(HeadTrainOptions):
    """How far the head is unrolled."""

    steps: int = option(3, "steps of the training-time test", low=1, high=8)
    own_vocabulary: bool = option(False, "train the LM head too, which begins as the target's")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrainOptions(HeadTrainOptions):
    """How deep the head is, and how many tokens it guesses at once."""

    layers: int = option(2, "decoder layers", low=1, high=8)
    length: int = option(6, "tokens of a block", low=1, high=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class KangarooTrainOptions(HeadTrainOptions):
    """Nothing more: the adapter reads the first of the layers whose states are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaTrainOptions(HeadTrainOptions):
    """How many heads there are."""

    heads: int = option(3, "heads: tokens that are guessed at once", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseTrainOptions(HeadTrainOptions):
    """How many heads there are."""

    heads: int = option(3, "heads: tokens that are guessed at once", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraTrainOptions(HeadTrainOptions):
    """How many heads there are, and of which kind."""

    heads: int = option(3, "heads: tokens that are guessed in a row", low=1, high=8)
    plus: bool = option(False, "Hydra++: deeper heads behind one decoder layer, taught by the target's distribution")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpeculatorTrainOptions(HeadTrainOptions):
    """How many steps there are."""

    heads: int = option(3, "steps: tokens that are guessed in a row", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReDrafterTrainOptions(HeadTrainOptions):
    """How far the network is unrolled."""

    length: int = option(4, "tokens in a row that it is trained for", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTrainOptions(HeadTrainOptions):
    """How many inputs are trained. Every row of a text runs through the whole target once for each."""

    probes: int = option(3, "probes: tokens that are guessed beyond the next one", low=1, high=8)
    batch_tokens: int = option(512, "tokens of answers in a batch", low=8)
    slow_rate: float = option(0.01, "peak learning rate (AdamW)", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitTrainOptions(HeadTrainOptions):
    """Which exit is measured, and how exits are trained. ``out`` is a whole model, which is another than the target."""

    exit: int = option(0, "layers before the exit that is measured; 0: a quarter of them", low=0, high=1024)
    apart: int = option(8, "of so many layers one exit learns in each step, by turns", low=1, high=256)
    exit_scale: float = option(0.1, "what early exits count, beside the last layer", low=0)
    dropout: float = option(0.1, "probability by which the last layer is dropped; earlier ones less", low=0, high=1)
    batch_tokens: int = option(512, "tokens of answers in a batch", low=8)
    slow_rate: float = option(4e-5, "peak learning rate (AdamW)", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoTrainOptions(HeadTrainOptions):
    """How many heads there are."""

    heads: int = option(2, "heads: tokens that are guessed beyond the next one", low=1, high=2)
