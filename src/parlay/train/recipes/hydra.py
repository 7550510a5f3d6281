"""Hydra (Ankner et al. 2024): heads that also read the embeddings of the tokens before their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.heads.hydra import HydraHeads
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import HydraTrainOptions
from parlay.train.recipes.several_heads import SeveralHeads, first_heads
from parlay.train.recipes.target import Target


class HydraRecipe(SeveralHeads):
    """See `SeveralHeads`; while training, heads read the text's own tokens.

    Hydra++ learns the target's own distribution in place of the text, weighted alike.
    """

    def __init__(self, heads: HydraHeads, target: Target) -> None:
        super().__init__(heads, target)
        self._heads = heads
        self._embedding_VH = target.embedding_VH

    def loss(self, batch: TrainingBatch) -> Tensor:
        plain = self._heads.prefix is None
        return super().loss(batch) if plain else self.soft_losses(batch, self.logits(batch))

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        states_BTH = batch.states_BTF[..., -self._heads.config.hidden_size :]
        hidden_BRH = self._heads.read(states_BTH, batch.padding_B, batch.rows)
        embedded: list[Tensor] = []
        for place, head in enumerate(self._heads.heads):
            ids_BR = batch.tokens_ahead(place + 1).clamp(min=0)
            embedded.append(F.embedding(ids_BR, self._embedding_VH).float())
            yield head(hidden_BRH, torch.cat(embedded, -1))

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        return {**super().settings(heldout), "plus": self._heads.prefix is not None}


def start(options: HydraTrainOptions, target: Target, texts: Sequence[Featured]) -> HydraRecipe:
    """From the best linear guess on."""
    make = partial(HydraHeads, plus=target.config if options.plus else None)
    return HydraRecipe(first_heads(make, target, texts, options.draft_vocab, options.heads), target)
