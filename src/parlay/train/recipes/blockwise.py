"""Blockwise parallel decoding (Stern et al. 2018) on a frozen target, and models that rescore (Kim et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from parlay.heads import ngrams
from parlay.heads.base import SeveralHeadsConfig
from parlay.heads.blockwise import WINDOW, BlockwiseHeads
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import BlockwiseTrainOptions
from parlay.train.recipes.by_depth import ByDepth
from parlay.train.recipes.recipe import final_states
from parlay.train.recipes.several_heads import SeveralHeads
from parlay.train.recipes.target import Target, common_tokens


class BlockwiseRecipe(SeveralHeads):
    """See `SeveralHeads`; the heads share the target's LM head.

    The model that rescores learns beside them, by the cross-entropy of each next token. ``counted`` are n-grams.
    """

    def __init__(self, heads: BlockwiseHeads, target: Target, counted: Mapping[str, Tensor]) -> None:
        super().__init__(heads, target, [heads.rescorer.get_parameter("lm_head.weight")])
        self._heads, self._counted = heads, dict(counted)
        self._embedding_VH = target.embedding_VH

    def loss(self, batch: TrainingBatch) -> Tensor:
        padded = F.pad(batch.ids_BT, (WINDOW - 1, 0))
        windows_BRW = padded.unfold(1, WINDOW, 1)[:, -batch.rows :]
        embedded = F.embedding(windows_BRW, self._embedding_VH).float().flatten(2)
        return super().loss(batch) + self.hard_loss(batch, 1, self._heads.rescorer(embedded))

    def logits(self, batch: TrainingBatch) -> Iterator[Tensor]:
        hidden_BRH = final_states(batch, self._config.hidden_size)
        for head in self._heads.heads:
            yield self._read(head(hidden_BRH))

    def tensors(self) -> dict[str, Tensor]:
        return {**ByDepth.tensors(self), **self._counted}


def start(options: BlockwiseTrainOptions, target: Target, texts: Sequence[Featured]) -> BlockwiseRecipe:
    """Heads that guess like the target's LM head, and the counts of all n-grams."""
    draft_ids_D = common_tokens(texts, options.draft_vocab, target.config.vocab_size)
    sizes = (target.config.hidden_size, target.config.vocab_size, len(draft_ids_D), options.heads)
    heads = BlockwiseHeads(SeveralHeadsConfig(*sizes), target.config.intermediate_size)
    heads.set_draft_vocab(draft_ids_D)
    return BlockwiseRecipe(heads, target, ngrams.count(text.ids_T[text.answer - 1 :].tolist() for text in texts))
