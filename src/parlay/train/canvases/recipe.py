"""Base of canvas recipes: the protocol, losses of masked positions, and the choice of trained weights.

Losses are pure functions of logits. Shapes: M positions, V tokens.
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
    """Optimizers that step together. One factor multiplies all peak rates."""

    def step(self, factor: float) -> None:
        """Make one update, and clear the gradients."""
        ...


class CanvasRecipe(ABC):
    """A way to train a decoder. The length of rows is a multiple of ``multiple``."""

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
        """Return the config.json keys that the finished model has in addition to its own."""

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerFast, card: str) -> None:
        """Write what was trained."""
        save_decoder(folder, self.decoder, tokenizer, card, self.config())

    def measure(self, batches: Sequence[RowBatch]) -> dict[str, float]:
        """Measure held-out rows: the mean loss, with the same masks each time."""
        self.draw.manual_seed(0)
        return {"loss": sum(float(self.loss(batch)) for batch in batches) / len(batches)}

    def masked_loss(self, hidden_BTH: Tensor, batch: RowBatch, masked_BT: Tensor, rate_BT: Tensor) -> Tensor:
        """Compute the function `masked_loss` from the states of the masked positions themselves."""
        logits_MV = self.decoder.head(hidden_BTH[masked_BT])
        return masked_loss(logits_MV, batch.ids_BT[masked_BT], rate_BT[masked_BT], int(batch.learned_BT.sum()))

    def text_loss(self, hidden_BTH: Tensor, batch: RowBatch) -> Tensor:
        """Return the cross-entropy of each learned token, from the causal state of the token before it."""
        wanted_BT = batch.text_BT[:, 1:]
        logits_MV = self.decoder.raw_head(hidden_BTH[:, :-1][wanted_BT])
        return next_token_loss(logits_MV, batch.ids_BT[:, 1:][wanted_BT])


class Scaled:
    """The optimizers of `parlay train lm`, with ``rate`` times their learning rates."""

    def __init__(self, decoder: Decoder, rate: float) -> None:
        self._optimizers, self._rate = Optimizers(decoder.inner), rate

    def step(self, factor: float) -> None:
        """Make one update; see `Stepper`."""
        self._optimizers.step(factor * self._rate)


class Slow:
    """AdamW over all weights that require a gradient."""

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
    """Return the decoder's module. Only its last ``layers`` layers and the final norm are trainable; 0: all of it."""
    inner: Any = decoder.inner
    if layers:
        inner.requires_grad_(False)
        for part in (*inner.model.layers[-layers:], inner.model.norm):
            part.requires_grad_(True)
    module: nn.Module = inner
    return module


def masked_loss(logits_MV: Tensor, labels_M: Tensor, rates_M: Tensor, places: int) -> Tensor:
    """Return the bound on a text's negative log-likelihood per position, from one draw of masks.

    It is the cross-entropy of the masked positions, each divided by the rate at which it was masked, averaged over all
    ``places`` that could have been masked (LLaDA, Nie et al. 2025, arXiv:2502.09992, equation 3; MDLM, Sahoo et al.
    2024, arXiv:2406.07524).
    """
    each_M = F.cross_entropy(logits_MV.float(), labels_M, reduction="none")
    return (each_M / rates_M).sum() / max(places, 1)


def divergence(teacher_MV: Tensor, student_MV: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of the student from the teacher, both as logits. The teacher gets
    no gradient."""
    if not len(teacher_MV):
        return student_MV.sum() * 0.0
    teacher = teacher_MV.detach().float().log_softmax(-1)
    return F.kl_div(student_MV.float().log_softmax(-1), teacher, log_target=True, reduction="batchmean")


def next_token_loss(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Return the mean cross-entropy of a text's next tokens; 0 if there are none."""
    return F.cross_entropy(logits_MV.float(), labels_M) if len(labels_M) else torch.zeros(())
