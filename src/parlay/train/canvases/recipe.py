"""The parts that canvas recipes share: their base class, losses of masked places, and the choice of trained weights.

Shapes: M places, V tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from parlay.train.canvases.decoders import Decoder, save_decoder
from parlay.train.canvases.rows import RowBatch
from parlay.train.optimizers import Optimizers, adam


class Stepper(Protocol):
    """Optimizers that step together, with one factor on all peak learning rates."""

    def step(self, factor: float) -> None:
        """Update the weights at ``factor`` times the peak rates, and clear the gradients."""
        ...


class CanvasRecipe(ABC):
    """One way to train a decoder. Rows are padded to a multiple of ``multiple`` tokens."""

    multiple = 1

    def __init__(self, decoder: Decoder, seed: int) -> None:
        self.decoder = decoder
        self.draw = torch.Generator().manual_seed(seed)

    @abstractmethod
    def optimizer(self) -> Stepper:
        """Make the optimizer of the weights that are trained."""

    @abstractmethod
    def loss(self, batch: RowBatch) -> Tensor:
        """Return the mean loss ``[]``."""

    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """Return the keys that the finished model's config.json gets in addition."""

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerFast, card: str) -> None:
        """Write the trained model."""
        save_decoder(folder, self.decoder, tokenizer, card, self.config())

    def measure(self, batches: Sequence[RowBatch]) -> dict[str, float]:
        """Measure held-out rows; the mean loss, each time with the same random masks."""
        self.draw.manual_seed(0)
        return {"loss": sum(float(self.loss(batch)) for batch in batches) / len(batches)}

    def masked_loss(self, hidden_BTH: Tensor, batch: RowBatch, masked_BT: Tensor, rate_BT: Tensor) -> Tensor:
        """Return the function `masked_loss` for states ``hidden_BTH`` at the masked places."""
        logits_MV = self.decoder.head(hidden_BTH[masked_BT])
        return masked_loss(logits_MV, batch.ids_BT[masked_BT], rate_BT[masked_BT], int(batch.learned_BT.sum()))

    def text_loss(self, hidden_BTH: Tensor, batch: RowBatch) -> Tensor:
        """Return the cross-entropy of the answers' tokens, each predicted from the causal state of the token before
        it."""
        wanted_BT = batch.text_BT[:, 1:]
        logits_MV = self.decoder.raw_head(hidden_BTH[:, :-1][wanted_BT])
        return next_token_loss(logits_MV, batch.ids_BT[:, 1:][wanted_BT])


class Scaled:
    """The optimizers of `parlay train lm`, with their learning rates times ``rate``."""

    def __init__(self, decoder: Decoder, rate: float) -> None:
        self._optimizers, self._rate = Optimizers(decoder.inner), rate

    def step(self, factor: float) -> None:
        """Make one update; see `Stepper`."""
        self._optimizers.step(factor * self._rate)


class Slow:
    """AdamW over all weights that require a gradient, with one peak learning rate."""

    def __init__(self, module: nn.Module, rate: float) -> None:
        self._rate = rate
        self._adam = adam([weight for weight in module.parameters() if weight.requires_grad], rate)

    def step(self, factor: float) -> None:
        """Make one update; see `Stepper`."""
        for group in self._adam.param_groups:
            group["lr"] = factor * self._rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)


def last_layers(decoder: Decoder, layers: int) -> nn.Module:
    """Make only the last ``layers`` layers and the final norm trainable (0: everything); return the decoder's
    module."""
    inner: Any = decoder.inner
    if layers:
        inner.requires_grad_(False)
        for part in (*inner.model.layers[-layers:], inner.model.norm):
            part.requires_grad_(True)
    module: nn.Module = inner
    return module


def masked_loss(logits_MV: Tensor, labels_M: Tensor, rates_M: Tensor, places: int) -> Tensor:
    """Return one sample of the upper bound on a text's negative log-likelihood per place.

    It sums the cross-entropy of the masked places, each divided by its mask rate, and divides by ``places``, the number
    of places that could have been masked (LLaDA, Nie et al. 2025, arXiv:2502.09992, equation 3; MDLM, Sahoo et al.
    2024, arXiv:2406.07524).
    """
    each_M = F.cross_entropy(logits_MV.float(), labels_M, reduction="none")
    return (each_M / rates_M).sum() / max(places, 1)


def divergence(teacher_MV: Tensor, student_MV: Tensor) -> Tensor:
    """Return the mean KL(teacher || student) of logits ``[M, V]``; the teacher gets no gradient."""
    if not len(teacher_MV):
        return student_MV.sum() * 0.0
    teacher = teacher_MV.detach().float().log_softmax(-1)
    return F.kl_div(student_MV.float().log_softmax(-1), teacher, log_target=True, reduction="batchmean")


def next_token_loss(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Return the mean cross-entropy of next tokens; 0 if there are none."""
    return F.cross_entropy(logits_MV.float(), labels_M) if len(labels_M) else torch.zeros(())
