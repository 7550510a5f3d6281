"""The recurrent drafter (Zhang et al. 2024): unrolled over the text's own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.heads.base import SeveralHeadsConfig
from parlay.heads.redrafter import ReDrafterHead
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import ReDrafterTrainOptions
from parlay.train.recipes.recipe import final_states
from parlay.train.recipes.several_heads import SeveralHeads
from parlay.train.recipes.target import Target, common_tokens


class ReDrafterRecipe(SeveralHeads):
    """See `SeveralHeads`; one network is run as often as there would be heads."""

    def __init__(self, head: ReDrafterHead, target: Target) -> None:
        super().__init__(head, target)
        self._head = head
        self._embedding_VH = target.embedding_VH

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        hidden_BRH = final_states(batch, self._head.config.hidden_size)
        state = torch.zeros_like(hidden_BRH)
        for step in range(self._head.config.heads):
            ids_BR = batch.tokens_ahead(step + 1).clamp(min=0)
            state = self._head.advance(state, F.embedding(ids_BR, self._embedding_VH).float())
            yield self._head.read(hidden_BRH, state)


def start(options: ReDrafterTrainOptions, target: Target, texts: Sequence[Featured]) -> ReDrafterRecipe:
    """A head that guesses like the target's LM head."""
    size, vocab_size = target.config.hidden_size, target.config.vocab_size
    draft_ids_D = common_tokens(texts, options.draft_vocab, vocab_size)
    head = ReDrafterHead(SeveralHeadsConfig(size, vocab_size, len(draft_ids_D), options.length))
    head.set_draft_vocab(draft_ids_D)
    with torch.no_grad():
        head.lm_head.weight.copy_(
            torch.cat((target.head_VH[draft_ids_D].float(), torch.zeros(len(draft_ids_D), size)), 1)
        )
    return ReDrafterRecipe(head, target)
