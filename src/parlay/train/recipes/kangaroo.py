"""Train Kangaroo's adapter (Liu et al. 2024): it predicts the target's next-token distribution from an early layer's
states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parlay.heads.kangaroo import KangarooAdapter
from parlay.heads.layer import Steps
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import KangarooTrainOptions
from parlay.train.recipes.by_depth import ByDepth
from parlay.train.recipes.recipe import soft_loss
from parlay.train.recipes.target import Target, common_tokens

_MEASURED = 3
"""Acceptance is measured up to this depth of a draft."""


class KangarooRecipe(ByDepth):
    """The loss is the cross-entropy with the target's distribution of each next token.

    At each depth of a draft the adapter reads states that the target's first layers computed. So row i of depth d is
    its prediction at row i + 1 + d.
    """

    def __init__(self, adapter: KangarooAdapter, target: Target) -> None:
        super().__init__(adapter, adapter, target)
        self._adapter = adapter

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        del heldout  # chains end where the adapter itself is unsure
        return {"taps": [self._target.usual_taps()[0]], "draft_vocab_size": len(self._head_DH)}

    def loss(self, batch: TrainingBatch) -> Tensor:
        return soft_loss(self._next(batch), self.teacher.probs(batch), self.teacher.usable(batch, 1))

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        logits_BRD = self._next(batch)
        for depth in range(_MEASURED):
            yield logits_BRD.roll(-depth - 1, 1)  # the last rows come round: nothing is known of what they guess

    def _next(self, batch: TrainingBatch) -> Tensor:
        """Return logits ``[B, R, D]`` of the token after each row."""
        states_BTH = batch.states_BTF[..., : self._adapter.config.hidden_size]
        return self._read(self._adapter(states_BTH, Steps(batch.padding_B, batch.rows)))


def start(options: KangarooTrainOptions, target: Target, texts: Sequence[Featured]) -> KangarooRecipe:
    """Make a recipe with an adapter whose attention adds nothing at the start."""
    draft_ids_D = common_tokens(texts, options.draft_vocab, target.config.vocab_size)
    adapter = KangarooAdapter(target.config, len(draft_ids_D))
    adapter.set_draft_vocab(draft_ids_D)
    with torch.no_grad():
        adapter.self_attn.o_proj.weight.zero_()
        adapter.norm.weight.copy_(target.tensor("model.norm.weight"))
    return KangarooRecipe(adapter, target)
