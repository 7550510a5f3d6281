"""Parallel heads of multi-token prediction (Gloeckle et al. 2024), on a target that stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parlay.heads.base import ParallelHeads
from parlay.heads.layer import add_nothing
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.recipes.layer_heads import LayerHeads
from parlay.train.recipes.target import Target, common_tokens


class ParallelMtpRecipe(LayerHeads):
    """Loss: sum of 0.8^k times the cross-entropy of head k with the target's own distribution of its token."""

    def __init__(self, heads: ParallelHeads, target: Target) -> None:
        super().__init__(heads, heads, target, len(heads.blocks))
        self._heads = heads

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        del heldout  # trees hold the paths of which the heads themselves are surest
        taps = [self._target.config.num_layers]
        return {"taps": taps, "draft_vocab_size": len(self._head_DH), "heads": self._steps}

    def loss(self, batch: TrainingBatch) -> Tensor:
        return self.soft_losses(batch, self.logits(batch))

    def unrolled(self, batch: TrainingBatch, count: int) -> Iterator[Tensor]:
        hidden_BTH = batch.states_BTF[..., -self._heads.config.hidden_size :]
        for place in range(count):
            yield self._heads.head(place, hidden_BTH, batch.padding_B, batch.rows)


def start_parallel(draft_vocab: int, heads: int, target: Target, texts: Sequence[Featured]) -> ParallelMtpRecipe:
    """Heads that guess like the target's LM head."""
    return ParallelMtpRecipe(first_parallel(draft_vocab, heads, target, texts), target)


def first_parallel(draft_vocab: int, heads: int, target: Target, texts: Sequence[Featured]) -> ParallelHeads:
    """Heads that guess like the target's LM head."""
    size = target.config.hidden_size
    draft_ids_D = common_tokens(texts, draft_vocab, target.config.vocab_size)
    module = ParallelHeads(target.config, len(draft_ids_D), heads)
    module.set_draft_vocab(draft_ids_D)
    states_NH = torch.cat([text.states_TF[text.answer - 1 :, -size:] for text in texts[:_MEASURED]]).float()
    with torch.no_grad():
        module.norm.weight.copy_(states_NH.square().mean().sqrt())
    for block in module.blocks:
        add_nothing(block)
    return module


_MEASURED = 64
"""Texts that show how large states are."""
