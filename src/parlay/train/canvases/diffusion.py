"""Recipes for masked diffusion and block diffusion: new or existing models that fill canvases of masked places.

Shapes: B rows, T tokens of each, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parlay.train.canvases import masks
from parlay.train.canvases.decoders import Decoder, canvas_config
from parlay.train.canvases.options import Bd3TrainOptions, MdlmTrainOptions
from parlay.train.canvases.recipe import CanvasRecipe, Scaled, Stepper
from parlay.train.canvases.rows import RowBatch
from parlay.types import FieldError

LEAST_RATE = 1e-3
"""The lowest mask rate (as in LLaDA), so that no loss is divided by nearly zero."""


class Mdlm(CanvasRecipe):
    """LLaDA's recipe (Nie et al. 2025, arXiv:2502.09992): each row has one mask rate, and all places attend to each
    other.

    Prompts are never masked. The end tokens that pad a row are trained on, so that the model learns how long answers
    are.
    """

    def __init__(self, options: MdlmTrainOptions, decoder: Decoder) -> None:
        super().__init__(decoder, options.seed)
        self._rate = options.rate

    def optimizer(self) -> Stepper:
        return Scaled(self.decoder, self._rate)

    def loss(self, batch: RowBatch) -> Tensor:
        ids_BT = batch.ids_BT
        rate_BT = masks.spread_rates(len(ids_BT), self.draw, LEAST_RATE)[:, None].expand_as(ids_BT)
        masked_BT = masks.masked_at(rate_BT, batch.learned_BT, self.draw)
        noisy_BT = torch.where(masked_BT, self.decoder.mask_id, ids_BT)
        hidden_BTH = self.decoder.hidden(noisy_BT, masks.everybody(ids_BT.shape[1]))
        return self.masked_loss(hidden_BTH, batch, masked_BT, rate_BT)

    def config(self) -> Mapping[str, Any]:
        return canvas_config(self.decoder.mask_id)


class Bd3(CanvasRecipe):
    """BD3-LM's recipe (Arriola et al. 2025, arXiv:2503.09573): each block has its mask rate; one forward trains all
    blocks.

    Rates between ``low`` and ``high`` reduce the variance of the loss; the paper searches the best for each block size.
    """

    def __init__(self, options: Bd3TrainOptions, decoder: Decoder) -> None:
        super().__init__(decoder, options.seed)
        self._rate, self.multiple = options.rate, options.block
        self._low, self._high = max(options.low, LEAST_RATE), options.high
        if self._low > self._high:
            raise FieldError("low", f"={options.low} is above high={options.high}: swap the two", "high")

    def optimizer(self) -> Stepper:
        return Scaled(self.decoder, self._rate)

    def loss(self, batch: RowBatch) -> Tensor:
        rows, length = batch.ids_BT.shape
        rates = masks.spread_rates(rows * length // self.multiple, self.draw, self._low, self._high)
        rate_BT = rates.view(rows, -1).repeat_interleave(self.multiple, 1)
        return block_loss(self, batch, rate_BT)

    def config(self) -> Mapping[str, Any]:
        return canvas_config(self.decoder.mask_id, self.multiple)


def block_loss(recipe: CanvasRecipe, batch: RowBatch, rate_BT: Tensor) -> Tensor:
    """Return the loss of masked places in blocks of ``recipe.multiple``; each block follows the clean blocks before
    it."""
    ids_BT, length = batch.ids_BT, batch.ids_BT.shape[1]
    masked_BT = masks.masked_at(rate_BT, batch.learned_BT, recipe.draw)
    noisy_BT = torch.where(masked_BT, recipe.decoder.mask_id, ids_BT)
    seen = masks.two_streams(masks.groups_of(length, recipe.multiple))
    hidden_BTH = recipe.decoder.streams(noisy_BT, ids_BT, seen)[:, :length]
    return recipe.masked_loss(hidden_BTH, batch, masked_BT, rate_BT)
