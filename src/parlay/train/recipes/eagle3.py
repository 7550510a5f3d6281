"""Train EAGLE-3's head (Li et al. 2025): training-time test over several steps, with the target's distribution as
labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from parlay.drafters.options import EAGLE3
from parlay.heads import artefact, store
from parlay.heads.base import draft_ids
from parlay.heads.eagle3 import Eagle3Config, Eagle3Head
from parlay.heads.layer import Steps
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import Eagle3TrainOptions
from parlay.train.recipes.layer_heads import RepeatedLayer, ScaledHead
from parlay.train.recipes.linear_start import feature_scale, start_eagle3
from parlay.train.recipes.target import Target, common_tokens
from parlay.types import FieldError


class Eagle3Recipe(RepeatedLayer):
    """Loss: the sum over steps j of 0.8^j times the cross-entropy, over rows whose next token can be drafted.

    The head runs ``steps`` times, each time on its own outputs (training-time test). Some features are hundreds of
    times larger than others, so in training the head reads features divided by ``scale_F``. Without ``own_vocabulary``
    the LM head is frozen, which saves a sixth of the time.
    """

    def __init__(
        self, head: Eagle3Head, target: Target, scale_F: Tensor, steps: int, *, own_vocabulary: bool = True
    ) -> None:
        head.lm_head.requires_grad_(own_vocabulary)
        self._head, self._scaled = head, ScaledHead(head, scale_F)
        super().__init__(self._scaled, head, target, steps, head.lm_head.parameters())

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        del heldout  # trees grow where the head itself is sure
        config = self._head.config
        return {"taps": list(config.taps), "draft_vocab_size": config.draft_vocab_size}

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights for unscaled features; without a frozen LM head if it is the target's embedding."""
        found = self._scaled.tensors()
        if self._target.tied and not self._head.lm_head.weight.requires_grad:
            del found["lm_head.weight"]
        return found

    def _first(self, batch: TrainingBatch) -> Tensor:
        return self._scaled.fused(batch)

    def _step(self, hidden_BTH: Tensor, embedded_BTH: Tensor, steps: Steps) -> Tensor:
        return self._head.step(hidden_BTH, embedded_BTH, steps)

    def _read(self, hidden_BRH: Tensor) -> Tensor:
        return self._head.logits(hidden_BRH)


def start(options: Eagle3TrainOptions, target: Target, texts: Sequence[Featured]) -> Eagle3Recipe:
    """Make the recipe; the head starts from the best linear guess, or from the head that the options name."""
    if options.head:
        head = _trained(options.head, target)
    else:
        draft_ids_D = common_tokens(texts, options.draft_vocab, target.config.vocab_size)
        head = start_eagle3(target, draft_ids_D, target.usual_taps(), texts)
    scale_F = feature_scale(texts, head.fc.in_features)
    return Eagle3Recipe(head, target, scale_F, options.steps, own_vocabulary=options.own_vocabulary)


def _trained(name: str, target: Target) -> Eagle3Head:
    """Load a head that was trained for this target, by folder or name.

    Raises UsageError if there is none or it reads layers that are not stored, BadHead if it is another target's.
    """
    trained = artefact.load(store.folder_of(EAGLE3, name))
    vocab_size = target.config.vocab_size
    witness_WH = target.embedding_VH.cpu()[artefact.witness_ids(vocab_size)]
    artefact.check_target(name, trained.layer, trained.witness_WH, witness_WH, vocab_size)
    config = Eagle3Config.of(trained)
    if config.taps != target.usual_taps():
        raise FieldError("head", f"={name}: it reads layers {config.taps}, and features are of {target.usual_taps()}")
    head = Eagle3Head(config)
    own = {"lm_head.weight": target.head_VH.cpu()[draft_ids(trained.tensors["d2t"])]}
    head.load_state_dict({**own, **trained.tensors})
    return head
