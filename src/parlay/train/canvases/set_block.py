"""Adapts a causal model so that it also fills masked places, with which it drafts for itself.

Shapes: B rows, T tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parlay.train.canvases import masks
from parlay.train.canvases.decoders import Decoder, set_block_config
from parlay.train.canvases.options import SetBlockTrainOptions
from parlay.train.canvases.recipe import CanvasRecipe, Scaled, Slow, Stepper, divergence, last_layers, next_token_loss
from parlay.train.canvases.rows import RowBatch
from parlay.types import FieldError


class SetBlockRecipe(CanvasRecipe):
    """Set block decoding (Gat et al. 2025, arXiv:2509.04185) with the masks of Fast-dLLM v2 (arXiv:2509.26328).

    A row's first canvas begins at its answer, or at a random place after that; other canvases follow. Each attends to
    the clean causal text before it and to itself. Prompts are never masked. As in causal models, the row before a place
    predicts it. Odd updates mask all places of canvases, as when the model drafts for itself. Even updates run two
    copies of each row, and mask each place in one of them, so that every place is predicted.

    The same weights serve the causal mode. To preserve it, the model is trained on the distributions of the model
    before training (``original``) at the clean rows of the same forward. Canvases are trained on these distributions
    too, while the papers train on the texts: a draft is accepted only if the model itself would write it. A ``new``
    model is trained on the texts.
    """

    def __init__(
        self, options: SetBlockTrainOptions, decoder: Decoder, original: Decoder | None = None, *, new: bool = False
    ) -> None:
        """Without an ``original``, the model is trained on the texts only; raises UsageError if ``keep`` then is above
        0."""
        super().__init__(decoder, options.seed)
        if original is None and options.keep:
            raise FieldError(
                "keep", f"={options.keep:g} needs an existing model; for a new one give --keep 0 --text-weight 1"
            )
        self._options, self._original, self._new = options, original, new
        self._turn = 0

    def optimizer(self) -> Stepper:
        if self._new:
            return Scaled(self.decoder, self._options.rate)
        return Slow(last_layers(self.decoder, self._options.layers), self._options.rate)

    def loss(self, batch: RowBatch) -> Tensor:
        self._turn += 1
        group_BT = masks.groups_of(batch.ids_BT.shape[1], self._options.block, self._begins(batch)[:, None])
        inside_BT = group_BT >= 0
        if self._turn % 2:
            return self._losses(batch, inside_BT, group_BT)
        rate_BT = torch.rand(len(group_BT), 1, generator=self.draw).expand_as(group_BT)
        masked_BT = masks.masked_at(rate_BT, inside_BT, self.draw)
        twice = RowBatch(*(each.repeat(2, *[1] * (each.ndim - 1)) for each in batch))
        return self._losses(twice, torch.cat([masked_BT, inside_BT & ~masked_BT]), group_BT.repeat(2, 1))

    def _begins(self, batch: RowBatch) -> Tensor:
        """Draw where each row's first canvas begins, ``[B]``: for half of the rows at the answer, for others up to a
        block later."""
        share_B = torch.rand(len(batch.answer_B), generator=self.draw)
        later_B = (2 * share_B - 1).clamp(min=0) * (batch.length_B - batch.answer_B).clamp(max=self._options.block)
        return batch.answer_B + later_B.long()

    def _losses(self, batch: RowBatch, masked_BT: Tensor, group_BT: Tensor) -> Tensor:
        """Return the loss of canvases plus the loss of the clean text.

        The row before a canvas predicts its first place. That row is clean, so this place belongs to the text's loss.
        """
        hidden_BTH, length = self._hidden(batch, masked_BT, group_BT), group_BT.shape[1]
        own_BTH = None
        if self._original is not None:
            with torch.no_grad():
                own_BTH = self._original.hidden(batch.ids_BT, masks.causal(length))
        guessed = self.guesses(hidden_BTH[:, :length], own_BTH, batch, masked_BT, group_BT)
        return guessed + self._loss(hidden_BTH[:, length:], own_BTH, batch, batch.text_BT[:, 1:])

    def guesses(
        self, hidden_BTH: Tensor, own_BTH: Tensor | None, batch: RowBatch, masked_BT: Tensor, group_BT: Tensor
    ) -> Tensor:
        """Return the loss of the rows that predict masked places."""
        guessed_BT = guessing_rows(masked_BT, group_BT) & (group_BT >= 0)[:, :-1] & batch.text_BT[:, 1:]
        return self._loss(hidden_BTH, own_BTH, batch, guessed_BT)

    def _loss(self, hidden_BTH: Tensor, own_BTH: Tensor | None, batch: RowBatch, wanted_BT: Tensor) -> Tensor:
        """Return the loss of rows whose next token is in ``wanted_BT``: against the token, and against the original
        model.

        The mask token stays in the vocabulary here, so that the causal mode learns never to write it.
        """
        logits_MV = self.decoder.raw_head(hidden_BTH[:, :-1][wanted_BT])
        total = logits_MV.sum() * 0.0
        if self._options.text_weight:
            total = total + self._options.text_weight * next_token_loss(logits_MV, batch.ids_BT[:, 1:][wanted_BT])
        if own_BTH is not None and self._original is not None:
            own_MV = self._original.raw_head(own_BTH[:, :-1][wanted_BT])
            total = total + self._options.keep * divergence(own_MV, logits_MV)
        return total

    def _hidden(self, batch: RowBatch, masked_BT: Tensor, group_BT: Tensor) -> Tensor:
        noisy_BT = torch.where(masked_BT, self.decoder.mask_id, batch.ids_BT)
        first = int((group_BT >= 0).any(0).int().argmax())  # what is before all canvases is clean, and guesses nothing
        return self.decoder.streams(noisy_BT, batch.ids_BT, masks.two_streams(group_BT, causal=True), first)

    def config(self) -> Mapping[str, Any]:
        return set_block_config(self.decoder.mask_id, self._options.block)

    def measure(self, batches: Sequence[RowBatch]) -> dict[str, float]:
        """Measure the causal mode's perplexity, and per depth the share of right drafts if canvases are masked as a
        whole.

        Canvases begin at answers.
        """
        size = self._options.block
        nats, right, counts = 0.0, torch.zeros(size), torch.zeros(size)
        for batch in batches:
            length = batch.ids_BT.shape[1]
            group_BT = masks.groups_of(length, size, batch.answer_B[:, None])
            hidden_BTH = self._hidden(batch, group_BT >= 0, group_BT)
            nats += float(self.text_loss(hidden_BTH[:, length:], batch)) / len(batches)
            wanted_BT = batch.text_BT[:, 1:] & (group_BT >= 0)[:, :-1]
            best_M = self.decoder.head(hidden_BTH[:, : length - 1][wanted_BT]).argmax(-1)
            place_M = ((torch.arange(length - 1) - batch.answer_B[:, None]) % size)[wanted_BT]
            hit_M = (best_M == batch.ids_BT[:, 1:][wanted_BT]).float()
            right.index_add_(0, place_M, hit_M)
            counts.index_add_(0, place_M, torch.ones_like(hit_M))
        shares = (right / counts.clamp(min=1)).tolist()
        return {"perplexity": math.exp(nats), **{f"guess {place + 1}": share for place, share in enumerate(shares)}}


def guessing_rows(masked_BT: Tensor, group_BT: Tensor) -> Tensor:
    """Return the rows of canvases whose next place is masked, or lies after the canvas, bool ``[B, T - 1]``."""
    return masked_BT[:, 1:] | (group_BT[:, 1:] != group_BT[:, :-1])
