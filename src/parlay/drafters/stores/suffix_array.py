"""Builds the suffix array of a token text by prefix doubling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[Any]

_KEY_BITS = 63


def suffix_array(tokens: Integers, sorted_more: Callable[[int], object] = bool) -> NDArray[np.int64]:
    """Where the suffixes of ``tokens`` begin, in sorted order; a suffix sorts before its own extensions.

    Prefix doubling (Manber and Myers 1993), without sorting suffixes again whose rank is unique (Larsson and Sadakane
    2007). It takes about 60 bytes of memory per token. ``sorted_more`` is called with how many more suffixes have their
    final rank.
    """
    size = len(tokens)
    keys, known = _first_keys(tokens)
    order = np.argsort(keys, kind="stable")
    ranks = np.empty(size, np.int64)  # rank of the first suffix with the same known prefix
    places = np.arange(size)  # ranks that are not final yet
    places = _rank(ranks, order, places, keys[order])
    sorted_more(size - len(places))
    while len(places):
        suffixes = order[places]
        after = suffixes + known
        following = np.where(after < size, ranks[np.minimum(after, size - 1)] + 1, 0)
        keys = ranks[suffixes] * (size + 1) + following
        by_key = np.argsort(keys, kind="stable")
        order[places] = suffixes[by_key]
        left = _rank(ranks, order, places, keys[by_key])
        sorted_more(len(places) - len(left))
        places, known = left, 2 * known
    return order


def _first_keys(tokens: Integers) -> tuple[Integers, int]:
    """A sort key per suffix, from as many of its first tokens as fit into one integer, and how many these are."""
    bits = (int(tokens.max(initial=0)) + 1).bit_length()  # 0 stands for the end
    known = max(1, _KEY_BITS // bits)
    keys = np.zeros(len(tokens), np.int64)
    for ahead in range(known):
        keys <<= bits
        keys[: max(0, len(tokens) - ahead)] += tokens[ahead:].astype(np.int64) + 1
    return keys, known


def _rank(ranks: Integers, order: Integers, places: Integers, keys: Integers) -> Integers:
    """Rank the suffixes at ``places`` by their sorted keys. Returns the places of those that share a key."""
    first = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    starts = np.maximum.accumulate(np.where(first, places, 0))
    ranks[order[places]] = starts
    alone = first & np.append(first[1:], True)[: len(keys)]
    left: Integers = places[~alone]
    return left
