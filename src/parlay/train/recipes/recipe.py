"""The protocol of recipes and their shared parts: the target's distribution as labels, and counts of right drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.train.data.batches import TrainingBatch
from parlay.train.recipes.target import Target


class Recipe(Protocol):
    """One way to train a drafter: its module, its loss and its measure.

    ``matrices`` are trained by Muon, ``slow`` (output vocabularies and norms) by AdamW.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def matrices(self) -> Sequence[nn.Parameter]: ...

    @property
    def slow(self) -> Sequence[nn.Parameter]: ...

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Return the mean loss ``[]``."""
        ...

    def right(self, batch: TrainingBatch) -> Tensor:
        """Count right drafts, int64 ``[depths + 1]``: first the drafts, then those that are right up to each depth.

        At each depth the draft is the likeliest token, after the text's own tokens. It is right if it is the text's
        token.
        """
        ...


class HeadRecipe(Recipe, Protocol):
    """A recipe whose module is, or holds, a draft head."""

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """Return the settings that the drafter needs besides the weights; some are measured on ``heldout``."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's weights under the names that the drafter reads."""
        ...


class ModelRecipe(ABC):
    """A recipe whose module is a whole model."""

    module: nn.Module

    @property
    @abstractmethod
    def matrices(self) -> Sequence[nn.Parameter]: ...

    @property
    @abstractmethod
    def slow(self) -> Sequence[nn.Parameter]: ...

    @abstractmethod
    def loss(self, batch: TrainingBatch) -> Tensor:
        """See `Recipe`."""

    @abstractmethod
    def right(self, batch: TrainingBatch) -> Tensor:
        """See `Recipe`."""

    @abstractmethod
    def save(self, folder: Path, card: str) -> None:
        """Write the model, its tokenizer and the card."""


class Teacher:
    """Computes the target's distribution over the draft vocabulary ``ids_D`` from stored states."""

    def __init__(self, target: Target, ids_D: Tensor) -> None:
        self._target, self._head_DH = target, target.head_VH[ids_D].float()
        self._known_V = torch.zeros(len(target.head_VH), dtype=torch.bool)
        self._known_V[ids_D] = True

    def probs(self, batch: TrainingBatch) -> Tensor:
        """Return the probabilities ``[B, R, D]`` of the token after each row."""
        with torch.no_grad():
            read_BRD = F.linear(final_states(batch, self._head_DH.shape[1]), self._head_DH)
            return self._target.logits(read_BRD).softmax(-1)

    def usable(self, batch: TrainingBatch, ahead: int) -> Tensor:
        """Return where the token ``ahead`` places after a row is in the text and in the draft vocabulary, bool ``[B,
        R]``."""
        ids_BR = batch.tokens_ahead(ahead)
        return batch.known_BR & (ids_BR >= 0) & self._known_V[ids_BR.clamp(min=0)]


def final_states(batch: TrainingBatch, size: int) -> Tensor:
    """Return the states ``[B, R, H]`` of the last R rows that the LM head reads: the last ``size`` numbers stored."""
    return batch.states_BTF[:, -batch.rows :, -size:]


def soft_loss(logits_BRD: Tensor, probs_BRD: Tensor, usable_BR: Tensor) -> Tensor:
    """Return the mean cross-entropy with the teacher's distribution, over rows where ``usable_BR`` is true."""
    losses_N = F.cross_entropy(logits_BRD.flatten(0, 1), probs_BRD.flatten(0, 1), reduction="none")
    weights_N = usable_BR.flatten().to(losses_N.dtype)
    return (losses_N * weights_N).sum() / weights_N.sum().clamp(min=1)


def right_tokens(draft_ids_BR: Tensor, batch: TrainingBatch, ahead: int) -> Tensor:
    """Compare drafts with the token ``ahead`` places after each row, int64 ``[B, R]``: 1 equal, 0 different, -1 no
    token."""
    ids_BR = batch.tokens_ahead(ahead)
    return torch.where(batch.known_BR & (ids_BR >= 0), (draft_ids_BR == ids_BR).long(), -1)


def counted(right_by_depth: Sequence[Tensor]) -> Tensor:
    """Sum the results of `right_tokens`, one per depth, to the counts of `Recipe.right`."""
    rows = right_by_depth[-1] >= 0
    so_far = rows.clone()
    counts = [rows.sum()]
    for right in right_by_depth:
        so_far &= right == 1
        counts.append(so_far.sum())
    return torch.stack(counts)
