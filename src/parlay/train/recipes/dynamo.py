"""DynaMo (Tuli et al. 2024): parallel heads, and the counts of what stands together in the texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from parlay.heads import ngrams
from parlay.heads.base import ParallelHeads
from parlay.train.data.features import Featured
from parlay.train.options import DynamoTrainOptions
from parlay.train.recipes.parallel_mtp import ParallelMtpRecipe, first_parallel
from parlay.train.recipes.target import Target


class DynamoRecipe(ParallelMtpRecipe):
    """See `ParallelMtpRecipe`; ``counted`` are n-grams."""

    def __init__(self, heads: ParallelHeads, target: Target, counted: Mapping[str, Tensor]) -> None:
        super().__init__(heads, target)
        self._counted = dict(counted)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **self._counted}


def start(options: DynamoTrainOptions, target: Target, texts: Sequence[Featured]) -> DynamoRecipe:
    """Heads that guess like the target's LM head, and the counts of all n-grams."""
    counted = ngrams.count(text.ids_T[text.answer - 1 :].tolist() for text in texts)
    return DynamoRecipe(first_parallel(options.draft_vocab, options.heads, target, texts), target, counted)
