"""Recipe for Kangaroo's adapter (Liu et al. 2024): it predicts the next token from the states of an early layer."""

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
"""Acceptance is measured up to this depth."""


class KangarooRecipe(ByDepth):
    """Loss: the cross-entropy of each next token with the target's own distribution.

    At every depth of a draft, the adapter reads states of the target's own first layers. So its draft at depth d for
    row i is its prediction at row i + 1 + d.
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
        """Return the logits ``[B, R, D]`` of the token after each row."""
        states_BTH = batch.states_BTF[..., : self._adapter.config.hidden_size]
        return self._read(self._adapter(states_BTH, Steps(batch.padding_B, batch.rows)))


def start(options: KangarooTrainOptions, target: Target, texts: Sequence[Featured]) -> KangarooRecipe:
    """Make the recipe; the adapter's attention adds nothing at first."""
    draft_ids_D = common_tokens(texts, options.draft_vocab, target.config.vocab_size)
    adapter = KangarooAdapter(target.config, len(draft_ids_D))
    adapter.set_draft_vocab(draft_ids_D)
    with torch.no_grad():
        adapter.self_attn.o_proj.weight.zero_()
        adapter.norm.weight.copy_(target.tensor("model.norm.weight"))
    return KangarooRecipe(adapter, target)
