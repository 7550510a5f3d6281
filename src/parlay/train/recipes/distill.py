"""Distillation: trains a small draft model on a target's distributions, or trains an existing one further.

A new student's embedding starts as the target's in fewer dimensions: the best approximation of that rank, by SVD. A
student may also be cut out of a model: it takes some layers, and the embedding and LM head, which stay frozen. The
target's distributions are computed from stored states, so the teacher does not run during training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.models.config import DecoderConfig, RopeConfig
from parlay.models.fetch.resolving import resolve
from parlay.models.gguf.writing import USUAL
from parlay.models.pruning.layers import evenly, only_layers, read_layers
from parlay.train.checkpoints import save_student
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.divergences import DIVERGENCES, SummedInParts, product_type
from parlay.train.options import DistillTrainOptions
from parlay.train.recipes.recipe import ModelRecipe, counted, final_states, right_tokens
from parlay.train.recipes.target import Target
from parlay.train.recipes.torch_decoder import TorchModel
from parlay.types import ParlayError

_MEASURED = 3
"""Acceptance is measured up to this depth of a draft."""
_ROWS = 128
"""Number of rows whose logits over the whole vocabulary are held at once."""
_SEEN = 256
"""About this many tokens of the vocabulary are read to measure a new student's logits."""
_ARCHITECTURE = "LlamaForCausalLM"


class DistillRecipe(ModelRecipe):
    """Loss: (1 - s) times the mean divergence from the target's distributions, plus s times the cross-entropy with the
    text.

    s is the options' `share_of_text`.
    """

    def __init__(
        self, options: DistillTrainOptions, target: Target, student: TorchModel, config: DecoderConfig
    ) -> None:
        self._options, self._target, self._student, self._config = options, target, student, config
        self.module: nn.Module = student
        self._divergence = DIVERGENCES[options.divergence]

    @property
    def matrices(self) -> Sequence[nn.Parameter]:
        return [
            weight for weight in self._student.model.layers.parameters() if weight.ndim == 2 and weight.requires_grad
        ]

    @property
    def slow(self) -> Sequence[nn.Parameter]:
        fast = {id(weight) for weight in self.matrices}
        return [weight for weight in self._student.parameters() if id(weight) not in fast and weight.requires_grad]

    def loss(self, batch: TrainingBatch) -> Tensor:
        known_BR = batch.known_BR & (batch.tokens_ahead(1) >= 0)
        text_N = batch.tokens_ahead(1)[known_BR]
        divergence_sum = self._divergence_sum(batch, known_BR)
        share = self._options.share_of_text

        def summed(logits_NV: Tensor, part: slice) -> Tensor:
            log_q_NV = logits_NV.float().log_softmax(-1)
            loss = share * F.nll_loss(log_q_NV, text_N[part], reduction="sum")
            return loss if share == 1 else loss + (1 - share) * divergence_sum(log_q_NV, part)

        total: Tensor = SummedInParts.apply(self._states(batch)[known_BR], self._student.head_VH, summed, _ROWS)  # type: ignore[no-untyped-call]
        return total / max(len(text_N), 1)

    def _divergence_sum(self, batch: TrainingBatch, known_BR: Tensor) -> Callable[[Tensor, slice], Tensor]:
        """Return a function that sums the divergence from the target's distributions over a slice of rows."""
        states_NH = final_states(batch, self._target.config.hidden_size)[known_BR]
        head_VH = self._target.head_VH.to(product_type())

        def summed(log_q_NV: Tensor, part: slice) -> Tensor:
            with torch.no_grad():
                log_p_NV = self._target.logits(F.linear(states_NH[part], head_VH).float()).log_softmax(-1)
            return self._divergence(log_p_NV, log_q_NV).sum()

        return summed

    def right(self, batch: TrainingBatch) -> Tensor:
        """See `Recipe.right`: counts the student's drafts."""
        states_BRH = self._states(batch)
        parts = torch.split(states_BRH.flatten(0, 1), _ROWS)
        likely_N = torch.cat([F.linear(part_NH, self._student.head_VH).argmax(-1) for part_NH in parts])
        drafted_BR = likely_N.view(states_BRH.shape[:2])
        return counted([right_tokens(drafted_BR.roll(-depth - 1, 1), batch, depth + 2) for depth in range(_MEASURED)])

    def save(self, folder: Path, card: str) -> None:
        """Write the student in the file format of its initial model, or of the target; see `save_student`."""
        tensors = {name: weight.detach().cpu() for name, weight in self.module.state_dict().items()}
        begun, embedding = _begun(self._options), self._options.embedding or USUAL
        like = resolve(begun or self._options.model)
        save_student(folder, self._config, tensors, like=like, card=card, embedding=embedding, same_family=bool(begun))

    def _states(self, batch: TrainingBatch) -> Tensor:
        """Return the states ``[B, R, h]`` of the last R rows that the student's LM head reads."""
        decoder = self._student.model
        return decoder.step(decoder.embed_tokens(batch.ids_BT), decoder.begin(batch.padding_B, batch.rows))


def start(options: DistillTrainOptions, target: Target, texts: Sequence[Featured]) -> DistillRecipe:
    """Make the recipe for a new student, a cut-out one, or an existing one.

    Raises ParlayError for a model with another vocabulary size, and for an embedding format if no GGUF file is written.
    """
    del texts
    like = _begun(options) or options.model
    if options.embedding and resolve(like).is_dir():
        raise ParlayError(
            f"embedding={options.embedding}: {like} is a folder, so the student is one in bfloat16: leave embedding "
            "out",
            "embedding",
        )
    if options.cut_from:
        cut = cut_out(_same_vocabulary(options.cut_from, target), options)
        return DistillRecipe(options, target, _partly_frozen(cut, options.learning_layers), cut.config)
    if options.student:
        named = _same_vocabulary(options.student, target)
        return DistillRecipe(options, target, TorchModel.of(named), named.config)
    config = student_config(options, target.config)
    return DistillRecipe(options, target, _new(config, target), config)


def _begun(options: DistillTrainOptions) -> str:
    """Return the model that the student's initial weights come from; empty if they are random."""
    return options.cut_from or options.student


def _same_vocabulary(model: str, target: Target) -> Target:
    """Open the model. Raises ParlayError if its vocabulary has another size than the target's."""
    named = Target.named(model, target.device)
    if named.config.vocab_size != target.config.vocab_size:
        raise ParlayError(
            f"{model} has a vocabulary of {named.config.vocab_size} tokens and the target one of "
            f"{target.config.vocab_size}: name a model with the target's tokenizer"
        )
    return named


def cut_out(model: Target, options: DistillTrainOptions) -> Target:
    """Return the model with only some of its layers, in their order. Raises UsageError for layers that it does not
    have."""
    layers = model.config.num_layers
    if options.keep_layers:
        kept = read_layers("keep_layers", options.keep_layers, layers)
    else:
        kept = evenly(min(options.layers, layers), layers)
    if model.config.layers:
        raise ParlayError(f"{options.cut_from}: layers that differ can't be cut out")
    return replace(model, config=replace(model.config, num_layers=len(kept)), weights=only_layers(model.weights, kept))


def _partly_frozen(cut: Target, learning: int) -> TorchModel:
    """Make a model of which only the last ``learning`` layers (0: all layers) and the final norm are trained."""
    made = TorchModel.of(cut)
    for weight in made.parameters():
        weight.requires_grad_(False)
    for part in (*list(made.model.layers)[-learning:], made.model.norm):
        for weight in part.parameters():
            weight.requires_grad_(True)
    return made


def student_config(options: DistillTrainOptions, target: DecoderConfig) -> DecoderConfig:
    """Return the requested shape, with the target's vocabulary and context."""
    return replace(
        target.plain,
        architecture=_ARCHITECTURE,
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        rope=RopeConfig(),
        tie_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        dtype="bfloat16",
        head=None,
    )


def _new(config: DecoderConfig, target: Target) -> TorchModel:
    """Make a student whose layers add little at first; its embedding is the target's LM head in fewer dimensions.

    The final norm is set so that logits first have a standard deviation of 1. With larger logits, the loss would start
    far above the loss of a uniform distribution.
    """
    made = TorchModel(config)
    head_VH = target.head_VH.float()
    _, axes_HH = torch.linalg.eigh(head_VH.T @ head_VH)  # rising, so the last ones hold most
    kept = min(config.hidden_size, axes_HH.shape[1])
    with torch.no_grad():
        embedding_VH = made.model.embed_tokens.weight.zero_()
        embedding_VH[:, :kept] = head_VH @ axes_HH[:, -kept:]
        for layer in made.model.layers:
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                layer.get_parameter(name).mul_(0.1)
        seen_NH = embedding_VH[:: max(1, len(embedding_VH) // _SEEN)]
        made.model.norm.weight.div_(F.linear(made.model.norm(seen_NH), embedding_VH).std())
    return made
