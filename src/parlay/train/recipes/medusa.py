"""Medusa-1 (Cai et al. 2024): heads on a frozen target learn the tokens that follow in its own texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from parlay.heads.medusa import MedusaHeads
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import MedusaTrainOptions
from parlay.train.recipes.recipe import final_states
from parlay.train.recipes.several_heads import SeveralHeads, first_heads
from parlay.train.recipes.target import Target


class MedusaRecipe(SeveralHeads):
    """See `SeveralHeads`; each head reads the state alone."""

    def __init__(self, heads: MedusaHeads, target: Target) -> None:
        super().__init__(heads, target)
        self._heads = heads

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        yield from self._heads(final_states(batch, self._heads.config.hidden_size))


def start(options: MedusaTrainOptions, target: Target, texts: Sequence[Featured]) -> MedusaRecipe:
    """From the best linear guess on."""
    return MedusaRecipe(first_heads(MedusaHeads, target, texts, options.draft_vocab, options.heads), target)
