"""Counted n-grams as a language model: trigrams that back off to bigrams and unigrams by absolute discounting.

p(x | a b) = (c(a b x) - d) / c(a b) + d n(a b) / c(a b) p(x | b), where n(a b) is the number of different tokens
after a b, and p(x | b) likewise (Ney, Essen and Kneser 1994).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

LONGEST = 3
_DISCOUNT = 0.75
_SEEN = 2
"""N-grams that occur less often are not kept, except for unigrams."""


def count(texts: Iterable[Sequence[int]]) -> dict[str, Tensor]:
    """Count the n-grams of texts; return tensors ``ngrams.N``, int32 ``[M, N + 1]``: the tokens of each, then its
    count."""
    counts: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(LONGEST)]
    for ids in texts:
        for size in range(1, LONGEST + 1):
            counts[size - 1].update(zip(*(ids[at:] for at in range(size)), strict=False))
    found: dict[str, Tensor] = {}
    for size, of_size in enumerate(counts, 1):
        rows = [(*ngram, times) for ngram, times in of_size.items() if times >= _SEEN or size == 1]
        found[f"ngrams.{size}"] = torch.tensor(sorted(rows), dtype=torch.int32).view(-1, size + 1)
    return found


class Ngrams:
    """An n-gram language model made from the tensors of `count`; it ignores others."""

    def __init__(self, tensors: Mapping[str, Tensor], vocab_size: int) -> None:
        self._floor = 1 / vocab_size
        self._after: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        for size in range(1, LONGEST + 1):
            for *before, token, times in tensors[f"ngrams.{size}"].tolist():
                self._after[tuple(before)][token] = times
        self._totals = {before: sum(followers.values()) for before, followers in self._after.items()}

    def probability(self, before: Sequence[int], token: int) -> float:
        """Return the probability of ``token`` after the tokens ``before``; only the last two of these matter."""
        share = self._floor
        for size in range(LONGEST):
            context = tuple(before[len(before) - size :])
            followers = self._after.get(context)
            if len(context) < size or not followers:
                break
            times, total = followers.get(token, 0), self._totals[context]
            share = max(times - _DISCOUNT, 0.0) / total + _DISCOUNT * len(followers) / total * share
        return share

    def affinity(self, before: Sequence[int], token: int) -> float:
        """Return how many times as likely ``token`` is after ``before`` as in general."""
        return self.probability(before, token) / self.probability((), token)

    def log_probabilities(self, before: Sequence[int], tokens: Iterable[int]) -> list[float]:
        """Return the logarithm of `probability` for each token."""
        return [math.log(self.probability(before, token)) for token in tokens]
