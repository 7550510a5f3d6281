"""Recipe for a head that drafts a block at once (P-EAGLE, Hui et al. 2026); each batch trains a block after each
row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.heads.block import BlockConfig, BlockHead
from parlay.heads.layer import add_nothing
from parlay.train.data.batches import TrainingBatch
from parlay.train.data.features import Featured
from parlay.train.options import BlockTrainOptions
from parlay.train.recipes.layer_heads import LayerHeads, ScaledHead
from parlay.train.recipes.linear_start import feature_scale, start_eagle3
from parlay.train.recipes.target import Target, common_tokens


class BlockRecipe(LayerHeads):
    """Loss: the sum over a block's tokens j of 0.8^j times the cross-entropy with the target's own distribution.

    The LM head is the target's, frozen. As in EAGLE-3, the head reads features divided by ``scale_F``.
    """

    def __init__(self, head: BlockHead, target: Target, scale_F: Tensor) -> None:
        head.lm_head.requires_grad_(False)
        self._head, self._scaled = head, ScaledHead(head, scale_F)
        super().__init__(self._scaled, head, target, head.config.length)
        self._embedding_VH = target.embedding_VH.float()

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        del heldout  # trees grow where the head itself is sure
        config = self._head.config
        sizes = {"layers": config.layers, "length": config.length, "mask_id": config.mask_id}
        return {"taps": list(config.taps), "draft_vocab_size": config.draft_vocab_size, **sizes}

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights for unscaled features; without the LM head if it is the target's embedding."""
        found = {**self._scaled.tensors(), "mask_hidden": self._head.mask_hidden.detach() * self._scaled.scale_F}
        if self._target.tied:
            del found["lm_head.weight"]
        return found

    def unrolled(self, batch: TrainingBatch, count: int) -> Iterator[Tensor]:
        del count  # a block is always run whole
        fused_BTH = self._scaled.fused(batch)
        ahead_BTH = F.pad(F.embedding(batch.ids_BT, self._embedding_VH)[:, 1:], (0, 0, 0, 1))
        mask_H = self._embedding_VH[self._head.config.mask_id]
        yield from self._head.unrolled(fused_BTH, ahead_BTH, mask_H, batch.padding_B, batch.rows)

    def _read(self, hidden_BRH: Tensor) -> Tensor:
        return self._head.logits(hidden_BRH)


def start(options: BlockTrainOptions, target: Target, texts: Sequence[Featured]) -> BlockRecipe:
    """Make the recipe; the first layer starts as EAGLE-3's, and the others add nothing."""
    draft_ids_D, taps = common_tokens(texts, options.draft_vocab, target.config.vocab_size), target.usual_taps()
    sizes = (options.layers, options.length, rarest_token(texts, target.config.vocab_size))
    head = BlockHead(BlockConfig(target.config, len(draft_ids_D), taps, *sizes))
    head.set_draft_vocab(draft_ids_D)
    first = start_eagle3(target, draft_ids_D, taps, texts)
    head.fc.load_state_dict(first.fc.state_dict())
    head.layers[0].load_state_dict(first.midlayer.state_dict())
    head.norm.load_state_dict(first.norm.state_dict())
    head.lm_head.load_state_dict(first.lm_head.state_dict())
    for layer in list(head.layers)[1:]:
        add_nothing(layer)
    return BlockRecipe(head, target, feature_scale(texts, head.fc.in_features))


def rarest_token(texts: Iterable[Featured], vocab_size: int) -> int:
    """Return the token that occurs least often in the texts; of several the highest, as tokenizers number rare tokens
    last."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts_V += torch.bincount(text.ids_T.long(), minlength=vocab_size).to(counts_V.device)
    return int((counts_V == counts_V.min()).nonzero()[-1])
