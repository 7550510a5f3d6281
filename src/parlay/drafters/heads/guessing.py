"""The best guesses of heads over a draft vocabulary, as the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.drafters.draft_models.guesses import Guess, best_guesses
from parlay.types import SequenceView


class Guessing:
    """``ids_D`` is the token of the target for each draft id, of ``vocab_size`` in all."""

    def __init__(self, ids_D: Tensor, vocab_size: int) -> None:
        self._ids_D, self._vocab_size = ids_D, vocab_size

    def best(
        self, logits_RD: Tensor, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], width: int
    ) -> list[list[Guess]]:
        """Per row the ``width`` best tokens by the request's own sampler, noise included, and their probabilities."""
        if all(view.request.params.greedy for view in views):
            best_RW = logits_RD.softmax(-1).topk(min(width, logits_RD.shape[-1]))
            ids_RW = self._ids_D[best_RW.indices].tolist()
            return [list(zip(*row, strict=True)) for row in zip(ids_RW, best_RW.values.tolist(), strict=True)]
        logits_RV = torch.full((len(logits_RD), self._vocab_size), -torch.inf)
        logits_RV[:, self._ids_D] = logits_RD
        return best_guesses(logits_RV, views, paths, width)
