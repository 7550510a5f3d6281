"""An index of frequent n-grams, each with a vector: counting, finding, and mapping from a file (SCONE, Yu et al. 2025).

The n-grams form a trie that is read from the newest token backwards. Node v < V is the token v; node V + i is the i-th
n-gram of the table, whose key is (node of its last n - 1 tokens) * V + its first token. Keys rise, so an n-gram comes
after its suffix, without which it could not be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
_PART = 1 << 20
"""Keys that are checked at a time."""


@dataclass(frozen=True, slots=True)
class NgramIndex:
    """The n-grams of 2 to ``longest`` tokens in a table: their ``keys`` ``[F]``, in rising order."""

    keys: Numbers
    vocab_size: int
    longest: int

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def is_sound(self) -> bool:
        """Whether keys rise, and each n-gram extends a token or an earlier n-gram by one token and is not too long.

        Following the nodes of an unsound index might never end.
        """
        parts = range(0, len(self), _PART)
        if not all(bool((np.diff(self.keys[begin : begin + _PART + 1]) > 0).all()) for begin in parts):
            return False
        if len(self) and self.keys[0] < 0:
            return False
        end = 0
        for _ in range(1, self.longest):  # first those that extend tokens, then those that extend these, ...
            end = int(np.searchsorted(self.keys, (self.vocab_size + end) * self.vocab_size))
        return end == len(self)

    def find(self, grams_NL: Numbers) -> Numbers:
        """The index of the longest n-gram of each row ``[N]``, or -1. Rows have their newest token first; -1 means no
        token."""
        node_N, found_N = grams_NL[:, 0].copy(), np.full(len(grams_NL), True)
        for before_N in grams_NL[:, 1 : self.longest].T:
            key_N = node_N * self.vocab_size + before_N
            place_N = np.searchsorted(self.keys, key_N)
            place_N[place_N == len(self.keys)] = 0
            found_N = found_N & (before_N >= 0) & (self.keys[place_N] == key_N)
            if not found_N.any():
                break
            node_N = np.where(found_N, place_N + self.vocab_size, node_N)
        return np.maximum(node_N - self.vocab_size, -1)

    def gram(self, number: int) -> tuple[int, ...]:
        """The tokens of an n-gram in text order."""
        tokens, node = [], number + self.vocab_size
        while node >= self.vocab_size:
            node, first = divmod(int(self.keys[node - self.vocab_size]), self.vocab_size)
            tokens.append(first)
        return (*tokens, node)

    def tokens(self) -> tuple[Numbers, Numbers]:
        """All n-grams in text order ``[F, longest]``, padded with zeros, and their lengths ``[F]``."""
        rows, lengths = np.zeros((len(self.keys), self.longest), np.int64), np.zeros(len(self.keys), np.int64)
        above, first = np.divmod(self.keys, self.vocab_size)
        for gram in range(len(self.keys)):
            parent = int(above[gram]) - self.vocab_size
            length = 1 if parent < 0 else int(lengths[parent])
            rest = [above[gram]] if parent < 0 else rows[parent, :length]
            rows[gram, 0], rows[gram, 1 : length + 1], lengths[gram] = first[gram], rest, length + 1
        return rows, lengths


def grams_of(ids_BT: Numbers, longest: int) -> Numbers:
    """The last ``longest`` tokens at each position of these texts ``[B * T, longest]``, newest first, padded with
    -1."""
    grams = np.full((*ids_BT.shape, longest), -1, np.int64)
    for back in range(min(longest, ids_BT.shape[1])):
        grams[:, back:, back] = ids_BT[:, : ids_BT.shape[1] - back]
    return grams.reshape(-1, longest)


@dataclass(slots=True)
class _Level:
    """N-grams of one length: each one's suffix (an index in the previous level, or a token), first token and count."""

    suffix: Numbers
    first: Numbers
    count: Numbers


def frequent_ngrams(tokens: npt.NDArray[Any], vocab_size: int, *, longest: int, most: int) -> NgramIndex:
    """Find the ``most`` most frequent n-grams that occur at least twice; shorter ones win ties.

    An n-gram's suffix is shorter and at least as frequent, so it is among them.
    """
    levels = _levels(tokens, vocab_size, longest)
    lengths = np.concatenate([np.full(len(level.count), place) for place, level in enumerate(levels)])
    order = np.lexsort((lengths, -np.concatenate([level.count for level in levels])))
    kept = np.zeros(len(order), bool)
    kept[order[:most]] = True
    begins = np.cumsum([0, *(len(level.count) for level in levels)])
    return _indexed(levels, [kept[begin:end] for begin, end in pairwise(begins)], vocab_size, longest)


def frequent_windows(tokens: npt.NDArray[Any], vocab_size: int, *, length: int, most: int) -> tuple[NgramIndex, int]:
    """Find the ``most`` most frequent n-grams of ``length`` tokens that occur at least twice, and their suffixes.

    These n-grams come last in the index; the second result is their number.
    """
    levels = _levels(tokens, vocab_size, length)
    kept = [np.zeros(len(level.count), bool) for level in levels]
    kept[-1][np.argsort(-levels[-1].count, kind="stable")[:most]] = True
    for place in reversed(range(1, len(levels))):
        kept[place - 1][levels[place].suffix[kept[place]]] = True
    return _indexed(levels, kept, vocab_size, length), int(kept[-1].sum())


def _levels(tokens: npt.NDArray[Any], vocab_size: int, longest: int) -> list[_Level]:
    """The n-grams that occur at least twice, by length from 2 on."""
    levels: list[_Level] = []
    node = tokens.astype(np.int64)
    for length in range(2, longest + 1):
        ends = np.flatnonzero(node[length - 1 :] >= 0) + length - 1
        key = node[ends] * vocab_size + tokens[ends - length + 1]
        keys, places, counts = np.unique(key, return_inverse=True, return_counts=True)
        often = counts > 1
        number = np.where(often, np.cumsum(often) - 1, -1)
        node = np.full(len(tokens), -1)
        node[ends] = number[places]
        levels.append(_Level(*np.divmod(keys[often], vocab_size), counts[often]))
    return levels


def _indexed(
    levels: Sequence[_Level], kept: Sequence[npt.NDArray[np.bool_]], vocab_size: int, longest: int
) -> NgramIndex:
    nodes, keys = np.arange(vocab_size), [np.empty(0, np.int64)]
    begin = vocab_size
    for level, own in zip(levels, kept, strict=True):
        key = nodes[level.suffix[own]] * vocab_size + level.first[own]
        order = np.argsort(key)
        keys.append(key[order])
        nodes = np.full(len(own), -1)
        nodes[np.flatnonzero(own)[order]] = begin + np.arange(len(key))
        begin += len(key)
    return NgramIndex(np.concatenate(keys), vocab_size, longest)
