"""Options of `parlay train METHOD`: those that all methods of training a drafter share, then each method's own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from parlay.models.config import DecoderConfig
from parlay.models.fetch.origin import weights_fingerprint
from parlay.models.gguf.writing import EMBEDDINGS
from parlay.options import option
from parlay.train.divergences import DIVERGENCES, FORWARD
from parlay.train.loop import LoopOptions
from parlay.types import FieldError

_MOST_SHARDS, _MINUTES_PER_SHARD = 16, 4
"""The most shards written by default, and the minutes of training for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTrainOptions(LoopOptions):
    """Options that all methods share: the target, the texts to train on, and where files go."""

    model: str = option("smollm2-135m", "the target, by name, folder or GGUF file")
    out: Path = option(Path("head"), "folder of the finished drafter")
    work: Path = option(Path("heads-work"), "folder of texts, features and checkpoints; a killed run continues from it")
    prompts: Path | None = option(
        None, 'text file with a prompt on each line, or JSON lines {"prompt": TEXT}; the target writes half of its own'
    )
    texts: Path | None = option(
        None,
        'more texts to train on: a folder of text files (.txt, .md, ...), or JSON lines {"prompt": TEXT, "answer": '
        "TEXT} in a file or folder, as parlay serve --record writes them; the target reads texts faster than it writes",
    )
    document_tokens: int = option(
        500_000,
        "how many tokens of text files to read at most, spread over all files; each takes some kilobytes on disk",
        low=8,
    )
    skip_broken: bool = option(False, "skip broken lines of these files")
    shards: int | None = option(
        None,
        "shards of 128 conversations that the target writes; 0: none, which needs --texts (default: one for each four "
        "minutes of --minutes, at most 16)",
        low=0,
    )
    threads: int | None = option(None, "number of threads (default: one per usable core)", low=1)
    answer_tokens: int = option(192, "most tokens of an answer that the target writes or --texts give", low=2)
    keep_features: bool = option(
        True, "store the target's hidden states in the work folder; else each run computes them again, in memory"
    )
    device: str = option("auto", "where the target and the training run: auto, cpu, cuda or mps")
    domain: str = option(
        "general", "kind of texts it is trained on, such as code or dialogue; strategies name the drafter by it"
    )
    licence: str = option("", "SPDX name of the drafter's licence; empty: the target's licence")
    whole: bool = option(True, "train on the prompts too, not only on answers")

    def __post_init__(self) -> None:
        LoopOptions.__post_init__(self)
        if self.shards == 0 and (self.texts is None or not self.whole):
            wishes = ["give texts=PATH"] * (self.texts is None) + ["remove whole=False"] * (not self.whole)
            problem = f"=0: the target writes nothing, so {', and '.join(wishes)}"
            raise FieldError("shards", problem, "texts", "whole=False")
        if self.shards == 0 and self.prompts is not None:
            raise FieldError(
                "prompts",
                "need a target that answers them, and with shards=0 it does not: remove one of them",
                "shards",
            )
        if self.texts is not None and not self.whole:
            raise FieldError(
                "texts",
                "are trained on as a whole, because the target did not write them: remove texts or whole=False",
                "whole=False",
            )

    @property
    def written_shards(self) -> int:
        """Return how many shards of conversations the target writes.

        By default one shard for each `_MINUTES_PER_SHARD` minutes of training, from 1 to `_MOST_SHARDS`: on two cores,
        writing then takes about as long as training.
        """
        if self.shards is not None:
            return self.shards
        return max(1, min(_MOST_SHARDS, round(self.minutes / _MINUTES_PER_SHARD)))

    def lasting(self) -> dict[str, str]:
        """Return the method's own options, ``seed`` and ``whole``; see `LoopOptions.lasting`.

        The other shared options may change: the work folder's own record (`check_filled`) guards the texts in it.
        """
        shared = {each.name for each in fields(DrafterTrainOptions)} - {"seed", "whole"}
        return {name: str(value) for name, value in asdict(self).items() if name not in shared}

    def layer(self, target: DecoderConfig) -> DecoderConfig:
        """Return the shape of the drafter's own layers for a target of this shape."""
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrainOptions(DrafterTrainOptions):
    """The options of all heads: the number of tokens that the head can draft."""

    draft_vocab: int = option(4096, "size of the draft vocabulary: the tokens that the target writes most often", low=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrainOptions(HeadTrainOptions):
    """The options of heads with decoder layers of their own: the width of these layers."""

    ffn: int = option(
        0, "width of the head's MLPs, a multiple of 32; narrower ones draft faster; 0: the target's width", low=0
    )

    def layer(self, target: DecoderConfig) -> DecoderConfig:
        """Return the target's layer shape, with ``ffn`` as MLP width if given; see `DrafterTrainOptions.layer`.

        Raises UsageError if ``ffn`` is not a multiple of 32, the block size of quantized weights.
        """
        if self.ffn % 32:
            raise FieldError("ffn", f"={self.ffn}: give a multiple of 32, because weights are stored in blocks of 32")
        return replace(target, intermediate_size=self.ffn) if self.ffn else target


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleTrainOptions(HeadTrainOptions):
    """Options of EAGLE: only those of all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpTrainOptions(HeadTrainOptions):
    """Options of multi-token prediction: the module's form, and the depths it is trained for."""

    form: str = option(
        "sequential",
        "sequential: one block, run again for each depth (DeepSeek); parallel: one layer per depth (Gloeckle et al.)",
        choices=("sequential", "parallel"),
    )
    steps: int = option(
        1, "depths to train for; a sequential module can draft deeper than that, from its own states", low=1, high=8
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3TrainOptions(LayerTrainOptions):
    """Options of EAGLE-3: the initial weights, the steps of training, and whether the LM head is trained."""

    head: str = option(
        "",
        "a head to train further, by folder or by its name in parlay drafters; it keeps its draft vocabulary; empty: "
        "a new head",
    )
    steps: int = option(3, "steps of the training-time test", low=1, high=8)
    own_vocabulary: bool = option(False, "train the LM head too, starting from the target's")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrainOptions(LayerTrainOptions):
    """Options of the block drafter: its number of layers, and how many tokens it drafts at once."""

    layers: int = option(2, "decoder layers", low=1, high=8)
    length: int = option(6, "tokens that one block drafts", low=1, high=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class KangarooTrainOptions(HeadTrainOptions):
    """Options of Kangaroo: only those of all heads.

    The adapter reads the input of the first layer among `Target.usual_taps`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaTrainOptions(HeadTrainOptions):
    """Options of Medusa: the number of heads."""

    heads: int = option(3, "heads: tokens that are drafted at once", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseTrainOptions(HeadTrainOptions):
    """Options of blockwise parallel decoding: the number of heads."""

    heads: int = option(3, "heads: tokens that are drafted at once", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraTrainOptions(HeadTrainOptions):
    """Options of Hydra: the number of heads, and whether they are Hydra++."""

    heads: int = option(3, "heads: tokens that are drafted one after another", low=1, high=8)
    plus: bool = option(
        False, "train Hydra++: deeper heads after one decoder layer, trained on the target's distribution"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpeculatorTrainOptions(HeadTrainOptions):
    """Options of the MLP speculator: the number of steps."""

    heads: int = option(3, "steps: tokens that are drafted one after another", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReDrafterTrainOptions(HeadTrainOptions):
    """Options of the recurrent drafter: the number of tokens that training unrolls it for."""

    length: int = option(4, "tokens that it is trained to draft one after another", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTrainOptions(HeadTrainOptions):
    """Options of methods that train probes: input embeddings appended to a text, at which the target predicts later
    tokens.

    Training costs more than for heads: every probe runs through the whole target once for each row of a text.
    """

    probes: int = option(3, "probes: tokens that are drafted after the next one", low=1, high=8)
    batch_tokens: int = option(512, "trained tokens in a batch", low=8)
    slow_rate: float = option(0.01, "peak learning rate (AdamW)", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BitaTrainOptions(ProbeTrainOptions):
    """Options of BiTA: those of probes, and the length of the trained prefix."""

    prefix: int = option(
        16, "length of the trained prefix: keys and values in each layer that only probes attend to", low=1, high=256
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTrainOptions(ProbeTrainOptions):
    """Options of Speculative Streaming: those of probes, how many layers streams run through, and how their start is
    computed."""

    layers: int = option(
        0, "last layers of the target that the streams run through; 0: a third of the layers", low=0, high=1024
    )
    rank: int = option(
        32, "rank of the matrix that makes the streams' first states from a token's state", low=1, high=4096
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitTrainOptions(DrafterTrainOptions):
    """Options of early exit (LayerSkip): how all exits are trained, and which one is measured.

    This trains the target itself, so ``out`` is a new whole model.
    """

    exit: int = option(
        0, "number of layers before the exit that is measured; 0: a quarter of the layers", low=0, high=1024
    )
    apart: int = option(8, "each step trains one exit in this many layers, by turns", low=1, high=256)
    exit_scale: float = option(0.1, "weight of early exits' losses, relative to the last layer's", low=0)
    dropout: float = option(
        0.1, "probability of dropping the last layer in training; earlier layers are dropped less", low=0, high=1
    )
    batch_tokens: int = option(512, "trained tokens in a batch", low=8)
    slow_rate: float = option(4e-5, "peak learning rate (AdamW)", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoTrainOptions(HeadTrainOptions):
    """Options of DynaMo: the number of heads."""

    heads: int = option(2, "heads: tokens that are drafted after the next one", low=1, high=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillTrainOptions(DrafterTrainOptions):
    """Options of distillation: the student's shape, its training texts, and the divergence to minimize."""

    out: Path = option(Path("draft"), "folder of the finished model")
    student: str = option("", "a model to train further, by folder or GGUF file; empty: a new one of the sizes below")
    cut_from: str = option(
        "",
        "a model with the target's tokenizer, by name, folder or GGUF file, from which the student takes some layers, "
        "and the embedding and LM head, which stay frozen",
    )
    keep_layers: str = option(
        "", "layers to take from it, counted from 0, such as 0,1,2,21,22,23; empty: --layers of them, evenly spaced"
    )
    learning_layers: int = option(0, "how many of these layers to train, from the last on; 0: all", low=0, high=128)
    hidden: int = option(192, "width of a new student", low=8, high=8192)
    layers: int = option(4, "layers of a new student, or taken from --cut-from", low=1, high=128)
    heads: int = option(3, "query heads of a new student", low=1, high=256)
    kv_heads: int = option(1, "key heads of a new student", low=1, high=256)
    head_dim: int = option(64, "size of each head", low=8, high=256)
    ffn: int = option(512, "width of a new student's feed-forward layers", low=8, high=65_536)
    divergence: str = option(
        FORWARD,
        "divergence to minimize: forward or reverse Kullback-Leibler, Jensen-Shannon (jsd) or total variation (tvd)",
        choices=tuple(DIVERGENCES),
    )
    text_share: float = option(
        0.0, "weight of the text's own tokens in the loss; the target's distributions have the rest", low=0, high=1
    )
    embedding: str = option(
        "",
        "format of the embedding, most of a small model, if the student is written as a GGUF file; empty: Q8_0",
        choices=("", *EMBEDDINGS),
    )
    source: str = option(
        "target",
        "who writes the answers: the target, or also the given student (on-policy)",
        choices=("target", "student"),
    )
    url: str = option(
        "", "an OpenAI-compatible server that answers the prompts; the student trains on its answers alone"
    )
    url_model: str = option("", "the model's name on that server")

    def __post_init__(self) -> None:
        DrafterTrainOptions.__post_init__(self)
        if self.cut_from and self.student:
            raise FieldError("cut_from", "and student both name the model to start from: remove one of them", "student")
        if (self.keep_layers or self.learning_layers) and not self.cut_from:
            raise FieldError("keep_layers", "and learning_layers need cut_from=MODEL", "learning_layers", "cut_from")
        if self.source == "student" and not self.student:
            raise FieldError("source", "=student: name the model that writes the answers by student=FOLDER", "student")
        if self.url and (not self.url_model or self.prompts is None):
            raise FieldError(
                "url",
                ": name the server's model by url_model=NAME, and what to answer by prompts=FILE",
                "url_model",
                "prompts",
            )
        if self.url and self.source == "student":
            raise FieldError("url", ": the server writes the answers, so remove source=student", "source")
        if self.url and self.texts is not None:
            raise FieldError("url", ": only the server's answers are trained on, so remove texts", "texts")
        if self.source == "student" and not self.whole:
            raise FieldError(
                "source",
                "=student: the student's texts are trained on as a whole, so remove whole=False",
                "whole=False",
            )

    def lasting(self) -> dict[str, str]:
        """Return the method's own options, see `DrafterTrainOptions.lasting`, with a fingerprint of the initial
        student's weights.

        The embedding's format is left out: it affects only the written file.
        """
        lasting = {name: value for name, value in DrafterTrainOptions.lasting(self).items() if name != "embedding"}
        return (
            {**lasting, "student": f"{self.student} ({weights_fingerprint(self.student)[:12]})"}
            if self.student
            else lasting
        )

    @property
    def share_of_text(self) -> float:
        """Return the weight of the text in the loss: 1 with ``url``, because a server returns no distributions."""
        return 1.0 if self.url else self.text_share
