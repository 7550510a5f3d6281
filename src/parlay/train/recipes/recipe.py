"""The protocol of recipes, and the losses that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from parlay.train.data.batches import TrainingBatch


class Recipe(Protocol):
    """One way to train a drafter.

    ``matrices`` are trained by Muon, ``slow`` (output vocabularies and norms) by AdamW.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def matrices(self) -> Sequence[nn.Parameter]: ...

    @property
    def slow(self) -> Sequence[nn.Parameter]: ...

    def loss(self, batch: TrainingBatch) -> Tensor:
        """The mean loss ``[]``."""
        ...

    def right(self, batch: TrainingBatch) -> Tensor:
        """Int64 ``[depths + 1]``: how many first tokens were drafted, then how many drafts were right up to each depth.

        A draft is the likeliest token at each depth, after the text's own tokens.
        """
        ...


def soft_loss(logits_ND: Tensor, ids_NK: Tensor, probs_NK: Tensor) -> Tensor:
    """Mean cross-entropy with the target's likeliest tokens, which are the K draft ids with these weights.

    A draft id of -1 is outside the draft vocabulary; the weights of the others are brought to a sum of 1.
    """
    weights_NK = probs_NK * (ids_NK >= 0)
    weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True).clamp(min=1e-6)
    log_probs_NK = logits_ND.float().log_softmax(-1).gather(1, ids_NK.clamp(min=0))
    return -(weights_NK * log_probs_NK).sum(-1).mean()


def counted(right_by_depth: Sequence[Tensor]) -> Tensor:
    """See `Recipe.right`: from whether each depth's token is right, and at all known, per row: int64, 1, 0 or -1."""
    so_far = torch.ones_like(right_by_depth[0], dtype=torch.bool)
    counts = [(right_by_depth[-1] >= 0).sum()]
    rows = right_by_depth[-1] >= 0
    for right in right_by_depth:
        so_far &= right == 1
        counts.append((so_far & rows).sum())
    return torch.stack(counts)
