"""EAGLE-3 (Li et al. 2025): training-time test over several steps, with the target's own distribution as labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.eagle3 import Eagle3Head
from parlay.heads.layer import Steps
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import Eagle3TrainOptions
from parlay.train.recipes.eagle3_start import feature_scale, start_head
from parlay.train.recipes.recipe import Teacher, counted, right_tokens, soft_loss
from parlay.train.recipes.target import Target, common_tokens

DECAY = 0.8
"""What a step's loss counts for, relative to the step before."""


class _Trained(nn.Module):
    """What a checkpoint holds: the head, which reads features divided by ``scale_F``."""

    scale_F: Tensor

    def __init__(self, head: Eagle3Head, scale_F: Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("scale_F", scale_F)
        head.fc.weight.data *= scale_F


class Eagle3Recipe:
    """Loss: sum of 0.8^j times the cross-entropy of step j, over rows whose next token can be drafted.

    The head runs ``steps`` times, each time on its own outputs. Row i of step j predicts token i + 2 + j. Some features
    are hundreds of times larger than others, so while it is trained the head reads them divided by ``scale_F``. Without
    ``own_vocabulary`` the LM head stays as it is, which takes a sixth less time.
    """

    def __init__(
        self, head: Eagle3Head, target: Target, scale_F: Tensor, steps: int, *, own_vocabulary: bool = True
    ) -> None:
        self.module: nn.Module = _Trained(head, scale_F)
        self._head, self._scale_F, self._steps = head, scale_F, steps
        self._target = target
        self._embedding_VH = target.embedding_VH.float()
        head.lm_head.requires_grad_(own_vocabulary)

    @cached_property
    def _teacher(self) -> Teacher:
        """Made when first used: a checkpoint may have brought another draft vocabulary."""
        return Teacher(self._target.head_VH, self._head.draft_ids)

    @property
    def matrices(self) -> Sequence[nn.Parameter]:
        head = self._head
        return [weight for part in (head.fc, head.midlayer) for weight in part.parameters() if weight.ndim == 2]

    @property
    def slow(self) -> Sequence[nn.Parameter]:
        fast = {id(weight) for weight in self.matrices}
        return [weight for weight in self._head.parameters() if id(weight) not in fast and weight.requires_grad]

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        del heldout  # trees grow where the head itself is sure
        config = self._head.config
        return {"taps": list(config.taps), "draft_vocab_size": config.draft_vocab_size}

    def tensors(self) -> dict[str, Tensor]:
        """A head that reads the features as they are; without the LM head, if that is still the target's embedding."""
        found = {**self._head.state_dict(), "fc.weight": self._head.fc.weight.detach() / self._scale_F}
        if self._target.tied and not self._head.lm_head.weight.requires_grad:
            del found["lm_head.weight"]
        return found

    def loss(self, batch: TrainingBatch) -> Tensor:
        probs_BRD, total = self._teacher.probs(batch), torch.zeros(())
        for step, hidden_BRH in enumerate(self._unrolled(batch)):
            rows = batch.rows - step - 1  # those whose label is one of the batch's rows
            logits_BRD = self._head.logits(hidden_BRH[:, :rows])
            usable_BR = self._teacher.usable(batch, step + 2)[:, :rows]
            total = total + DECAY**step * soft_loss(logits_BRD, probs_BRD[:, step + 1 :], usable_BR)
        return total

    def right(self, batch: TrainingBatch) -> Tensor:
        drafted = (self._head.draft_ids[self._head.logits(hidden).argmax(-1)] for hidden in self._unrolled(batch))
        return counted([right_tokens(ids_BR, batch, step + 2) for step, ids_BR in enumerate(drafted)])

    def _unrolled(self, batch: TrainingBatch) -> Iterator[Tensor]:
        """Hidden states ``[B, R, H]`` after each step."""
        steps = Steps(batch.padding_B, batch.rows)
        hidden = self._head.fuse(batch.states_BTF[..., : len(self._scale_F)] / self._scale_F)
        embedded_BTH = F.embedding(batch.ids_BT, self._embedding_VH)
        for step in range(self._steps):
            rows = hidden.shape[1]
            ahead = F.pad(embedded_BTH[:, step + 1 :], (0, 0, 0, step + 1))  # a text's end has nothing to add
            hidden = self._head.step(hidden, ahead[:, -rows:], steps)
            yield hidden


def start(options: Eagle3TrainOptions, target: Target, texts: Sequence[Featured]) -> Eagle3Recipe:
    """From the best linear guess on."""
    draft_ids_D = common_tokens(texts, options.draft_vocab, target.config.vocab_size)
    head = start_head(target, draft_ids_D, target.usual_taps(), texts)
    scale_F = feature_scale(texts, head.fc.in_features)
    return Eagle3Recipe(head, target, scale_F, options.steps, own_vocabulary=options.own_vocabulary)
