"""Infinity-gram (Liu et al. 2024, arXiv:2401.17377): the longest end of a context that a corpus has decides.

Nothing is counted beforehand: a corpus and its suffix array answer for n-grams of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

LONGEST = 512
"""Tokens of a context that are looked for at most."""

_MANY = 1 << 16
"""Occurrences whose followers are all looked at; of more, as many are, spread evenly."""


class SuffixIndex(Protocol):
    """A corpus with its suffix array, as `parlay.drafters.stores.datastore_file.Datastore` has them.

    Borders between its texts are one id, which is above all tokens.
    """

    @property
    def tokens(self) -> npt.NDArray[Any]: ...
    @property
    def suffixes(self) -> npt.NDArray[Any]: ...
    def longest(self, tokens: Sequence[int], shortest: int) -> tuple[int, int, int]: ...


@dataclass(frozen=True, slots=True)
class Support:
    """A corpus's knowledge of a place in a text.

    ``length`` tokens before it occur in the corpus ``total`` times with something after them; ``times`` of these, the
    token asked for follows.
    """

    length: int
    total: int
    times: int

    @property
    def probability(self) -> float:
        return self.times / self.total if self.total else 0.0


class InfinityGram:
    """Counts and probabilities after the longest end of a context that occurs. Several threads may use it."""

    def __init__(self, corpus: SuffixIndex) -> None:
        self._corpus = corpus

    def support(self, context: Sequence[int], token: int) -> Support:
        """How often ``token`` follows the longest end of ``context`` that occurs; without one, how often it occurs."""
        length, start, end = self._longest(context)
        known = list(context[len(context) - length :])
        first, last = _following(self._corpus, known, token, (start, end))
        return Support(length, end - start, last - first)

    def followers(self, context: Sequence[int]) -> tuple[int, Mapping[int, int]]:
        """The length of that end, and how often each token followed it; of many occurrences, of a sample of them."""
        length, start, end = self._longest(context)
        found = end - start
        looked_at = min(found, _MANY)
        places = start + np.arange(looked_at) * found // max(1, looked_at)
        tokens, counts = np.unique(self._corpus.tokens[self._corpus.suffixes[places] + length], return_counts=True)
        return length, dict(zip(tokens.tolist(), counts.tolist(), strict=True))

    def scores(self, tokens: Sequence[int]) -> list[Support]:
        """The support of each token of a text after those before it."""
        return [self.support(tokens[max(0, at - LONGEST) : at], token) for at, token in enumerate(tokens)]

    def _longest(self, context: Sequence[int]) -> tuple[int, int, int]:
        length, start, end = self._corpus.longest(list(context[-LONGEST:]), 1)
        return (length, start, end) if length else (0, 0, len(self._corpus.suffixes))


def _following(corpus: SuffixIndex, known: Sequence[int], token: int, rows: tuple[int, int]) -> tuple[int, int]:
    """Which of the suffixes that begin with ``known`` go on with the token: they are sorted by what follows."""
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
