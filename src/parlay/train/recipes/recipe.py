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
    """A way to train one kind of drafter.

    Muon trains ``matrices``; AdamW trains ``slow`` (output vocabularies and norms).
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
        """Return int64 ``[depths + 1]``: how many first tokens were drafted, then how many drafts were right up to each
        depth.

        A draft is the likeliest token at each depth, after the text's own tokens. It is right if it is the text's next
        token.
        """
        ...


class HeadRecipe(Recipe, Protocol):
    """A recipe whose module is, or holds, a draft head."""

    def settings(self, heldout: Iterable[TrainingBatch]) -> dict[str, Any]:
        """Return the settings that the drafter needs besides the weights."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's weights in the form that the drafter reads."""
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
    """Computes the target's distribution over a draft vocabulary.

    ``ids_D`` is the draft vocabulary. The last H numbers stored for each token are the state that the LM head reads.
    """

    def __init__(self, target: Target, ids_D: Tensor) -> None:
        self._target, self._head_DH = target, target.head_VH[ids_D].float()
        self._known_V = torch.zeros(len(target.head_VH), dtype=torch.bool)
        self._known_V[ids_D] = True

    def probs(self, batch: TrainingBatch) -> Tensor:
        """Return probabilities ``[B, R, D]`` of the token after each row."""
        with torch.no_grad():
            read_BRD = F.linear(final_states(batch, self._head_DH.shape[1]), self._head_DH)
            return self._target.logits(read_BRD).softmax(-1)

    def usable(self, batch: TrainingBatch, ahead: int) -> Tensor:
        """Return bool ``[B, R]``: whether the token ``ahead`` positions after the row is in the text and can be
        drafted."""
        ids_BR = batch.tokens_ahead(ahead)
        return batch.known_BR & (ids_BR >= 0) & self._known_V[ids_BR.clamp(min=0)]


def final_states(batch: TrainingBatch, size: int) -> Tensor:
    """Return the states ``[B, R, H]`` of the last R rows that the LM head reads: the last ``size`` numbers stored."""
    return batch.states_BTF[:, -batch.rows :, -size:]


def soft_loss(logits_BRD: Tensor, probs_BRD: Tensor, usable_BR: Tensor) -> Tensor:
    """Return the mean cross-entropy with the teacher's distribution over the usable rows."""
    losses_N = F.cross_entropy(logits_BRD.flatten(0, 1), probs_BRD.flatten(0, 1), reduction="none")
    weights_N = usable_BR.flatten().to(losses_N.dtype)
    return (losses_N * weights_N).sum() / weights_N.sum().clamp(min=1)


def right_tokens(draft_ids_BR: Tensor, batch: TrainingBatch, ahead: int) -> Tensor:
    """Return int64 ``[B, R]``: 1 if the token ``ahead`` positions after the row was drafted, 0 if not, -1 if there
    is none."""
    ids_BR = batch.tokens_ahead(ahead)
    return torch.where(batch.known_BR & (ids_BR >= 0), (draft_ids_BR == ids_BR).long(), -1)


def counted(right_by_depth: Sequence[Tensor]) -> Tensor:
    """Return the counts of `Recipe.right`, from the result of `right_tokens` for each depth."""
    rows = right_by_depth[-1] >= 0
    so_far = rows.clone()
    counts = [rows.sum()]
    for right in right_by_depth:
        so_far &= right == 1
        counts.append(so_far.sum())
    return torch.stack(counts)
