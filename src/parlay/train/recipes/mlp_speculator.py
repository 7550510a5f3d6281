"""The MLP speculator (Wertheimer et al. 2024): steps that carry a state along the text's own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parlay.heads.mlp_speculator import MlpSpeculator
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import MlpSpeculatorTrainOptions
from parlay.train.recipes.recipe import final_states
from parlay.train.recipes.several_heads import SeveralHeads, first_heads
from parlay.train.recipes.target import Target


class MlpSpeculatorRecipe(SeveralHeads):
    """See `SeveralHeads`. The texts are the target's own, as in the second stage of the paper."""

    def __init__(self, speculator: MlpSpeculator, target: Target) -> None:
        super().__init__(speculator, target, speculator.emb.parameters())
        self._speculator = speculator

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        config = self._speculator.config
        state = self._speculator.begin(final_states(batch, config.hidden_size))
        for step in range(config.heads):
            state = self._speculator.advance(step, state, batch.tokens_ahead(step + 1).clamp(min=0))
            yield self._speculator.read(step, state)


def start(options: MlpSpeculatorTrainOptions, target: Target, texts: Sequence[Featured]) -> MlpSpeculatorRecipe:
    """With the target's embedding; see `first_heads`."""
    speculator = first_heads(MlpSpeculator, target, texts, options.draft_vocab, options.heads)
    with torch.no_grad():
        speculator.emb.weight.copy_(target.embedding_VH.float())
    return MlpSpeculatorRecipe(speculator, target)
