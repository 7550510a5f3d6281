"""Infinity-gram (Liu et al. 2024, arXiv:2401.17377): predicts by the longest suffix of a context found in a corpus.

Nothing is counted beforehand: the suffix array of the corpus finds n-grams of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

LONGEST = 512
"""The most tokens of a context that are searched for."""

_MANY = 1 << 16
"""The most occurrences whose followers are counted. If there are more, this many are sampled at even distances."""


class SuffixIndex(Protocol):
    """A corpus with its suffix array, such as `parlay.drafters.stores.datastore_file.Datastore`.

    One id above all token ids separates the texts.
    """

    @property
    def tokens(self) -> npt.NDArray[Any]: ...
    @property
    def suffixes(self) -> npt.NDArray[Any]: ...
    def longest(self, tokens: Sequence[int], shortest: int) -> tuple[int, int, int]: ...


@dataclass(frozen=True, slots=True)
class Support:
    """How well a corpus supports a token at a position of a text.

    The longest suffix of the text before that the corpus contains has ``length`` tokens. It occurs ``total`` times with
    a follower; in ``times`` of these occurrences the follower is the token.
    """

    length: int
    total: int
    times: int

    @property
    def probability(self) -> float:
        return self.times / self.total if self.total else 0.0


class InfinityGram:
    """Gives counts and probabilities after the longest suffix of a context in the corpus. Several threads may use
    it."""

    def __init__(self, corpus: SuffixIndex) -> None:
        self._corpus = corpus

    def support(self, context: Sequence[int], token: int) -> Support:
        """Count how often ``token`` follows the longest known suffix of ``context``. If no suffix is known, count all
        its occurrences."""
        length, start, end = self._longest(context)
        known = list(context[len(context) - length :])
        first, last = _following(self._corpus, known, token, (start, end))
        return Support(length, end - start, last - first)

    def followers(self, context: Sequence[int]) -> tuple[int, Mapping[int, int]]:
        """Return the length of the longest known suffix and the counts of its followers, sampled if there are many."""
        length, start, end = self._longest(context)
        found = end - start
        looked_at = min(found, _MANY)
        places = start + np.arange(looked_at) * found // max(1, looked_at)
        tokens, counts = np.unique(self._corpus.tokens[self._corpus.suffixes[places] + length], return_counts=True)
        return length, dict(zip(tokens.tolist(), counts.tolist(), strict=True))

    def scores(self, tokens: Sequence[int]) -> list[Support]:
        """Return the support of each token of a text after the tokens before it."""
        return [self.support(tokens[max(0, at - LONGEST) : at], token) for at, token in enumerate(tokens)]

    def _longest(self, context: Sequence[int]) -> tuple[int, int, int]:
        length, start, end = self._corpus.longest(list(context[-LONGEST:]), 1)
        return (length, start, end) if length else (0, 0, len(self._corpus.suffixes))


def _following(corpus: SuffixIndex, known: Sequence[int], token: int, rows: tuple[int, int]) -> tuple[int, int]:
    """Return the range of suffixes that begin with ``known`` and then ``token``, by binary search."""
    tokens, suffixes, length = corpus.tokens, corpus.suffixes, len(known)
    bounds = []
    for bound in (token, token + 1):
        low, high = rows
        while low < high:
            middle = (low + high) // 2
            if int(tokens[int(suffixes[middle]) + length]) < bound:
                low = middle + 1
            else:
                high = middle
        bounds.append(low)
    return bounds[0], bounds[1]
