"""Medusa-1 (Cai et al. 2024): heads on a frozen target learn the tokens that follow in its own texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parlay.heads.medusa import MedusaConfig, MedusaHeads
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import MedusaTrainOptions
from parlay.train.recipes.recipe import final_states
from parlay.train.recipes.several_heads import SeveralHeads
from parlay.train.recipes.target import Target, common_tokens


class MedusaRecipe(SeveralHeads):
    """See `SeveralHeads`; each head reads the state alone."""

    def __init__(self, heads: MedusaHeads, target: Target) -> None:
        super().__init__(heads, heads.config, target, heads.lm_heads)
        self._heads = heads

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        yield from self._heads(final_states(batch, self._heads.config.hidden_size))


def start(options: MedusaTrainOptions, target: Target, texts: Sequence[Featured]) -> MedusaRecipe:
    """Heads that guess like the target's LM head."""
    size, vocab_size = target.config.hidden_size, target.config.vocab_size
    draft_ids_D = common_tokens(texts, options.draft_vocab, vocab_size)
    heads = MedusaHeads(MedusaConfig(size, vocab_size, len(draft_ids_D), options.heads))
    heads.set_draft_vocab(draft_ids_D)
    with torch.no_grad():
        for weight in heads.lm_heads.parameters():
            weight.copy_(target.head_VH[draft_ids_D].float())
    return MedusaRecipe(heads, target)
