"""Heads that propose the target's common tokens only: which ones, in the form that published heads have."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DraftVocab(nn.Module):
    """The base class of heads over ``size`` of the target's ``vocab_size`` tokens."""

    d2t: Tensor
    """Draft id to target id, as an offset: target = draft + d2t[draft]."""
    t2d: Tensor
    """Bool ``[V]``: whether the draft vocabulary has this token of the target."""

    def __init__(self, size: int, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))

    def set_draft_vocab(self, ids_D: Tensor) -> None:
        """``ids_D`` int64: the target's tokens that the head can propose, rising."""
        self.d2t.copy_(ids_D - torch.arange(len(ids_D)))
        self.t2d.zero_()[ids_D] = True

    @property
    def draft_ids(self) -> Tensor:
        """Target id of each draft id, int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def draft_ids(d2t_D: Tensor) -> Tensor:
    """The target's token of each draft id, int64; ``d2t_D`` holds them as offsets."""
    return d2t_D + torch.arange(len(d2t_D))
