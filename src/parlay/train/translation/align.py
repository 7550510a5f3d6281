"""Aligns each token of a translation with a source token, by expectation maximisation over all pairs.

This is IBM's Model 2 in the form of fast_align (Dyer et al. 2013): tokens at about the same relative position are
aligned more often. There is no empty source word, so each token of a translation belongs to one source token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from parlay.system.progress import Ticker
from parlay.train.translation.pairs import Pair

TENSION = 4.0
"""How strongly alignment prefers equal relative positions (fast_align's initial value)."""
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Cells:
    """The K combinations of a source token with a token of its translation, over all pairs of texts.

    W different pairs (source token id, target token id) occur among them; ``word_K`` is the number of each cell's pair.
    ``source_K`` and ``target_K`` are the places of its two tokens among the tokens of all sources and of all targets.
    ``near_K`` is the weight for its distance from the diagonal. ``ids_W`` is the source token id of each pair of ids.
    """

    word_K: Tensor
    source_K: Tensor
    target_K: Tensor
    near_K: Tensor
    ids_W: Tensor

    @staticmethod
    def of(pairs: Sequence[Pair]) -> Cells:
        """Make the cells of all pairs: for each token of a translation, all source tokens in order."""
        sources_B, targets_B = (torch.tensor([len(part) for part in each]) for each in _sides(pairs))
        sources, targets = (torch.tensor([token for part in each for token in part]) for each in _sides(pairs))
        pair_K = torch.arange(len(pairs)).repeat_interleave(sources_B * targets_B)
        first_B = (sources_B * targets_B).cumsum(0) - sources_B * targets_B
        offset_K = torch.arange(len(pair_K)) - first_B[pair_K]
        at_K, to_K = offset_K % sources_B[pair_K], offset_K // sources_B[pair_K]
        source_K = (sources_B.cumsum(0) - sources_B)[pair_K] + at_K
        target_K = (targets_B.cumsum(0) - targets_B)[pair_K] + to_K
        apart_K = ((at_K + 0.5) / sources_B[pair_K] - (to_K + 0.5) / targets_B[pair_K]).abs()
        wide = int(targets.max()) + 1
        words = (sources[source_K] * wide + targets[target_K]).numpy()
        found, word_K = map(torch.from_numpy, np.unique(words, return_inverse=True))
        return Cells(word_K, source_K, target_K, (-TENSION * apart_K).exp(), found // wide)


def _sides(pairs: Sequence[Pair]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [pair.source for pair in pairs], [pair.target for pair in pairs]


def posteriors(cells: Cells, chances_W: Tensor) -> Tensor:
    """Return the probability ``[K]`` that each cell's target token is aligned with its source token."""
    scores_K = cells.near_K * chances_W[cells.word_K]
    sums = torch.zeros(int(cells.target_K.max()) + 1, dtype=scores_K.dtype).index_add(0, cells.target_K, scores_K)
    return scores_K / sums[cells.target_K]


def learned(cells: Cells, chances_W: Tensor) -> Tensor:
    """Return the translation probabilities ``[W]``, target given source token, after one more round."""
    counts_W = torch.zeros_like(chances_W).index_add(0, cells.word_K, posteriors(cells, chances_W))
    sums_V = torch.zeros(int(cells.ids_W.max()) + 1, dtype=counts_W.dtype).index_add(0, cells.ids_W, counts_W)
    return counts_W / sums_V[cells.ids_W]


def aligned(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs with the ``fertilities`` of their source tokens: how many target tokens are aligned with
    each."""
    if not pairs:
        return []
    with Ticker(1 + _ROUNDS, "Aligning", "round") as shown:
        cells = Cells.of(pairs)
        shown.step()
        chances_W = torch.ones(len(cells.ids_W))
        for _ in range(_ROUNDS):
            chances_W = learned(cells, chances_W)
            shown.step()
    found_K = posteriors(cells, chances_W)
    most = torch.zeros(int(cells.target_K.max()) + 1).scatter_reduce(0, cells.target_K, found_K, "amax")
    best = torch.where(found_K == most[cells.target_K], cells.source_K, torch.iinfo(torch.long).max)
    chosen = torch.full_like(most, torch.iinfo(torch.long).max, dtype=torch.long)
    chosen = chosen.scatter_reduce(0, cells.target_K, best, "amin")
    counts = torch.bincount(chosen, minlength=int(cells.source_K.max()) + 1).tolist()
    ends = torch.tensor([len(pair.source) for pair in pairs]).cumsum(0).tolist()
    each = [tuple(counts[end - len(pair.source) : end]) for pair, end in zip(pairs, ends, strict=True)]
    return [replace(pair, fertilities=own) for pair, own in zip(pairs, each, strict=True)]
