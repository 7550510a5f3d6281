"""Options of `parlay train` that all methods of training a head share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from parlay.models.config import DecoderConfig
from parlay.models.fetch.origin import weights_fingerprint
from parlay.models.gguf.writing import EMBEDDINGS
from parlay.options import UsageError, option
from parlay.train.divergences import DIVERGENCES, FORWARD
from parlay.train.loop import LoopOptions

_MOST_SHARDS, _MINUTES_PER_SHARD = 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTrainOptions(LoopOptions):
    """Which target, and on what its drafter is trained."""

    model: str = option("smollm2-135m", "the target, by name, folder or GGUF file")
    out: Path = option(Path("head"), "folder of the finished drafter")
    work: Path = option(Path("heads-work"), "folder of texts, features and checkpoints; a killed run goes on from it")
    prompts: Path | None = option(
        None, 'text file with a prompt on each line, or JSON lines {"prompt": TEXT}; the target writes half of its own'
    )
    texts: Path | None = option(
        None,
        'what to learn from besides: a folder of text files (.txt, .md, ...), or JSON lines {"prompt": TEXT, "answer": '
        "TEXT} in a file or folder, as parlay serve --record keeps them; reading is quicker than writing",
    )
    document_tokens: int = option(
        500_000, "most tokens of text files that are read, from all over them; each takes some kilobytes", low=8
    )
    skip_broken: bool = option(False, "leave broken lines of these files out")
    shards: int | None = option(
        None,
        "shards of 128 conversations that the target writes; 0: none, with --texts (default: one for each four minutes "
        "of --minutes, at most 16)",
        low=0,
    )
    threads: int | None = option(None, "number of threads (default: one per usable core)", low=1)
    answer_tokens: int = option(192, "most tokens of an answer", low=2)
    keep_features: bool = option(
        True, "keep the target's features in the work folder; else each run computes them anew and holds them in memory"
    )
    device: str = option("auto", "where the target and the training run: auto, cpu, cuda or mps")
    domain: str = option(
        "general", "kind of texts it is trained on, say code or dialogue: the name under which strategies find it"
    )
    licence: str = option("", "licence of what is trained, as SPDX names it; empty: the target's")
    whole: bool = option(True, "learn from the prompts too, not from answers alone")

    def __post_init__(self) -> None:
        LoopOptions.__post_init__(self)
        if self.shards == 0 and (self.texts is None or not self.whole):
            raise UsageError(
                "shards=0: the target writes nothing then, so name texts, and learn from the whole of them"
            )
        if self.shards == 0 and self.prompts is not None:
            raise UsageError("prompts are for the target to answer, and with shards=0 it writes nothing: leave one out")
        if self.texts is not None and not self.whole:
            raise UsageError(
                "texts that others wrote are learned from as a whole alone: leave out texts, or whole=False"
            )

    @property
    def written_shards(self) -> int:
        """How many shards the target writes: by default so many that writing takes about as long as training on two
        cores."""
        if self.shards is not None:
            return self.shards
        return max(1, min(_MOST_SHARDS, round(self.minutes / _MINUTES_PER_SHARD)))

    def lasting(self) -> dict[str, str]:
        """See `LoopOptions.lasting`: the options of the method itself. The work folder records which texts are in
        it."""
        shared = {each.name for each in fields(DrafterTrainOptions)} - {"seed", "whole"}
        return {name: str(value) for name, value in asdict(self).items() if name not in shared}

    def layer(self, target: DecoderConfig) -> DecoderConfig:
        """The shape of the drafter's own layers, given the target's."""
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrainOptions(DrafterTrainOptions):
    """The number of tokens that the head can draft."""

    draft_vocab: int = option(4096, "tokens that can be drafted: those that the target writes most", low=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrainOptions(HeadTrainOptions):
    """The width of the head's own layers."""

    ffn: int = option(
        0, "inner size of the head's MLPs, a multiple of 32: a narrower one drafts faster; 0: the target's", low=0
    )

    def layer(self, target: DecoderConfig) -> DecoderConfig:
        """See `DrafterTrainOptions.layer`. Raises UsageError for a size that is not whole blocks of weights."""
        if self.ffn % 32:
            raise UsageError(f"ffn={self.ffn}: weights are kept in blocks of 32, so give a multiple of 32")
        return replace(target, intermediate_size=self.ffn) if self.ffn else target


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleTrainOptions(HeadTrainOptions):
    """No options beyond those of all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpTrainOptions(HeadTrainOptions):
    """The form of the module, and the number of tokens that it is trained for."""

    form: str = option(
        "sequential",
        "sequential: one block, used again for every depth (DeepSeek); parallel: a layer for each (Gloeckle et al.)",
        choices=("sequential", "parallel"),
    )
    steps: int = option(1, "depths that it is trained for; one block drafts further on its own states", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3TrainOptions(LayerTrainOptions):
    """Where the head begins, and for how many steps it is unrolled."""

    head: str = option(
        "",
        "a head to train further, by folder or by its name in parlay drafters, whose draft vocabulary stays; empty: a "
        "new one",
    )
    steps: int = option(3, "steps of the training-time test", low=1, high=8)
    own_vocabulary: bool = option(False, "train the LM head too, which begins as the target's")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrainOptions(LayerTrainOptions):
    """The depth of the head, and how many tokens it drafts at once."""

    layers: int = option(2, "decoder layers", low=1, high=8)
    length: int = option(6, "tokens of a block", low=1, high=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class KangarooTrainOptions(HeadTrainOptions):
    """No further options: the adapter reads the first of the layers whose states are stored."""


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
    """The number of heads, and their kind."""

    heads: int = option(3, "heads: tokens that are guessed in a row", low=1, high=8)
    plus: bool = option(False, "Hydra++: deeper heads behind one decoder layer, taught by the target's distribution")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpeculatorTrainOptions(HeadTrainOptions):
    """How many steps there are."""

    heads: int = option(3, "steps: tokens that are guessed in a row", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReDrafterTrainOptions(HeadTrainOptions):
    """For how many steps the network is unrolled."""

    length: int = option(4, "tokens in a row that it is trained for", low=1, high=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTrainOptions(HeadTrainOptions):
    """The number of trained inputs. Every row of a text runs through the whole target once for each of them."""

    probes: int = option(3, "probes: tokens that are guessed beyond the next one", low=1, high=8)
    batch_tokens: int = option(512, "tokens of answers in a batch", low=8)
    slow_rate: float = option(0.01, "peak learning rate (AdamW)", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BitaTrainOptions(ProbeTrainOptions):
    """How long the prefix is."""

    prefix: int = option(16, "keys and values in each layer that the probes alone see", low=1, high=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTrainOptions(ProbeTrainOptions):
    """Where streams begin, and how."""

    layers: int = option(0, "last layers of the target through which streams run; 0: a third of them", low=0, high=1024)
    rank: int = option(32, "rank of the map from a token's state to the first states of its streams", low=1, high=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitTrainOptions(DrafterTrainOptions):
    """Which exit is measured, and how exits are trained. ``out`` is a whole model, different from the target."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillTrainOptions(DrafterTrainOptions):
    """The student's shape, its training data, and the divergence from the target that it minimizes."""

    out: Path = option(Path("draft"), "folder of the finished model")
    student: str = option("", "a model to train further, by folder or GGUF file; empty: a new one of these sizes")
    cut_from: str = option(
        "",
        "a model with the target's tokenizer, by name, folder or GGUF file: the student keeps some of its layers, and "
        "its embedding and LM head, which do not learn",
    )
    keep_layers: str = option(
        "", "which of them, counted from 0, as in 0,1,2,21,22,23; empty: --layers of them, evenly from first to last"
    )
    learning_layers: int = option(0, "of these the last so many learn; 0: all", low=0, high=128)
    hidden: int = option(192, "width of a new student", low=8, high=8192)
    layers: int = option(4, "its layers", low=1, high=128)
    heads: int = option(3, "its query heads", low=1, high=256)
    kv_heads: int = option(1, "its key heads", low=1, high=256)
    head_dim: int = option(64, "size of each", low=8, high=256)
    ffn: int = option(512, "width of its feed-forward layers", low=8, high=65_536)
    divergence: str = option(
        FORWARD,
        "forward or reverse Kullback-Leibler, Jensen-Shannon, or total variation from the target's distributions",
        choices=tuple(DIVERGENCES),
    )
    text_share: float = option(0.0, "weight of the text itself, beside the target's distributions", low=0, high=1)
    embedding: str = option(
        "",
        "format of the embedding, which is most of a small model, where a GGUF file is written; empty: Q8_0",
        choices=("", *EMBEDDINGS),
    )
    source: str = option(
        "target",
        "who writes the answers: the target, or the student as it is now (on-policy)",
        choices=("target", "student"),
    )
    url: str = option("", "an OpenAI-compatible server that answers the prompts; only its text is learned from")
    url_model: str = option("", "the model's name there")

    def __post_init__(self) -> None:
        DrafterTrainOptions.__post_init__(self)
        if self.cut_from and self.student:
            raise UsageError("cut_from and student both name what the student begins as: leave out one of them")
        if (self.keep_layers or self.learning_layers) and not self.cut_from:
            raise UsageError("keep_layers and learning_layers go with cut_from=MODEL")
        if self.source == "student" and not self.student:
            raise UsageError("source=student: name the student that writes, by student=FOLDER")
        if self.url and (not self.url_model or self.prompts is None):
            raise UsageError("url: name the model there by url_model, and the prompts to answer by prompts=FILE")
        if self.url and self.source == "student":
            raise UsageError("url: the server writes the answers, so source=student can't be asked for")
        if self.url and self.texts is not None:
            raise UsageError("url: the server's answers are all that is learned from, so leave texts out")
        if self.source == "student" and not self.whole:
            raise UsageError("source=student: what the student wrote is learned from as a whole: leave out whole=False")

    def lasting(self) -> dict[str, str]:
        """The same, with the model that the student begins as, and without the format of the written file."""
        lasting = {name: value for name, value in DrafterTrainOptions.lasting(self).items() if name != "embedding"}
        return (
            {**lasting, "student": f"{self.student} ({weights_fingerprint(self.student)[:12]})"}
            if self.student
            else lasting
        )

    @property
    def share_of_text(self) -> float:
        """A server returns no distributions, so with one the student learns from the text alone."""
        return 1.0 if self.url else self.text_share
