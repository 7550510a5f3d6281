"""Hydra (Ankner et al. 2024): heads that also read the embeddings of the tokens before their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.heads.hydra import HydraHeads
from parlay.heads.medusa import MedusaConfig
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import HydraTrainOptions
from parlay.train.recipes.recipe import final_states
from parlay.train.recipes.several_heads import SeveralHeads
from parlay.train.recipes.target import Target, common_tokens


class HydraRecipe(SeveralHeads):
    """See `SeveralHeads`; while training, heads read the text's own tokens."""

    def __init__(self, heads: HydraHeads, target: Target) -> None:
        vocabularies = nn.ModuleList(head.get_submodule("lm_head") for head in heads.heads)
        super().__init__(heads, heads.config, target, vocabularies)
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
    size, vocab_size = target.config.hidden_size, target.config.vocab_size
    draft_ids_D = common_tokens(texts, options.draft_vocab, vocab_size)
    heads = HydraHeads(MedusaConfig(size, vocab_size, len(draft_ids_D), options.heads))
    heads.set_draft_vocab(draft_ids_D)
    with torch.no_grad():
        for head in heads.heads:
            head.get_parameter("lm_head.weight").copy_(target.head_VH[draft_ids_D].float())
    return HydraRecipe(heads, target)
