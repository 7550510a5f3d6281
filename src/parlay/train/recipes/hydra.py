"""Hydra (Ankner et al. 2024): heads that also read the embeddings of the tokens before their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.heads.hydra import HydraHeads
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import HydraTrainOptions
from parlay.train.recipes.recipe import final_states
from parlay.train.recipes.several_heads import SeveralHeads, first_heads
from parlay.train.recipes.target import Target


class HydraRecipe(SeveralHeads):
    """See `SeveralHeads`; while training, heads read the text's own tokens."""

    def __init__(self, heads: HydraHeads, target: Target) -> None:
        super().__init__(heads, target)
        self._heads = heads
        self._embedding_VH = target.embedding_VH

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        hidden_BRH = final_states(batch, self._heads.config.hidden_size)
        embedded: list[Tensor] = []
        for place, head in enumerate(self._heads.heads):
            ids_BR = batch.tokens_ahead(place + 1).clamp(min=0)
            embedded.append(F.embedding(ids_BR, self._embedding_VH).float())
            yield head(hidden_BRH, torch.cat(embedded, -1))


def start(options: HydraTrainOptions, target: Target, texts: Sequence[Featured]) -> HydraRecipe:
    """Heads that guess like the target's LM head."""
    return HydraRecipe(first_heads(HydraHeads, target, texts, options.draft_vocab, options.heads), target)
