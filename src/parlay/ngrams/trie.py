"""A trie of n-grams in sorted columns. It finds the continuations of one n-gram or of millions at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Integers = NDArray[Any]
"""Whole numbers of any width, signed or not."""

PAD, UNKNOWN, BEGIN, END, FIRST = range(5)
"""Special ids in a trie: padding, a word outside the vocabulary, the beginning and the end of a text; and `FIRST`,
which stands for the vocabulary's id 0."""

BLOCK = 1 << 21
"""Rows that are processed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """All n-grams of 1 to `order` ids, sorted. The place of an n-gram is its index among the n-grams of its length.

    ``tokens[n - 1]`` is the last id of each n-gram of n ids. For n = 1 it is empty: each of the ``size`` ids is its own
    place. The continuations of n-gram i by one id, sorted by that id, are at ``starts[n - 1][i]:starts[n - 1][i + 1]``
    among the n-grams of n + 1 ids.
    """

    size: int
    tokens: tuple[Integers, ...]
    starts: tuple[Integers, ...]

    @property
    def order(self) -> int:
        return len(self.tokens)

    def count(self, n: int) -> int:
        """Return the number of n-grams of n ids."""
        return self.size if n == 1 else len(self.tokens[n - 1])

    def continued(self, n: int, parents: Integers, ids: Integers) -> Integers:
        """Return the places of n-grams of n ids (n >= 2): the n-grams at ``parents``, extended by ``ids``; -1 if not
        found.

        A parent of -1 has no continuations. Both arrays have one dimension and the same length.
        """
        tokens, starts = self.tokens[n - 1], self.starts[n - 2]
        low, ends = np.zeros(len(parents), np.int64), np.zeros(len(parents), np.int64)
        known = np.flatnonzero(parents >= 0)
        low[known], ends[known] = starts[parents[known]], starts[parents[known] + 1]
        high, searching = ends.copy(), np.flatnonzero(low < ends)
        while len(searching):
            first, last = low[searching], high[searching]
            middle = (first + last) >> 1
            less = tokens[middle] < ids[searching]
            low[searching] = first = np.where(less, middle + 1, first)
            high[searching] = last = np.where(less, last, middle)
            searching = searching[first < last]
        inside = np.flatnonzero(low < ends)
        found = np.full(len(parents), -1, np.int64)
        hits = inside[tokens[low[inside]] == ids[inside]]
        found[hits] = low[hits]
        return found

    def endings(self, ids: Integers) -> list[Integers]:
        """Return, for n = 1 to the order, the place of the n-gram of n ids that ends at each of the ids; -1 if not
        found."""
        found = [ids.astype(np.int64)]
        for n in range(2, self.order + 1):
            found.append(self.continued(n, np.append(-1, found[-1][:-1]), ids))
        return found

    def families(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of n-grams of n ids. A range has at most `BLOCK` continuations, unless it is a single n-gram."""
        starts, parent, count = self.starts[n - 1], 0, self.count(n)
        while parent < count:
            last = int(np.searchsorted(starts, int(starts[parent]) + BLOCK, "right")) - 1
            last = min(max(last, parent + 1), parent + BLOCK, count)
            yield parent, last
            parent = last

    def parents(self, n: int, first: int, last: int) -> Integers:
        """Return, for each continuation of the n-grams ``first`` to ``last`` of n ids, the place of the n-gram that it
        extends."""
        sizes: Integers = np.diff(self.starts[n - 1][first : last + 1].astype(np.int64))
        return np.repeat(np.arange(first, last), sizes)

    def rows(self, n: int, first: int, last: int) -> list[Integers]:
        """Return the ids of n-grams ``first`` to ``last`` of n ids, a column for each position."""
        places = np.arange(first, last)
        columns: list[Integers] = []
        for length in range(n, 1, -1):
            columns.append(self.tokens[length - 1][places])
            places = np.searchsorted(self.starts[length - 2], places, "right") - 1
        return [places, *reversed(columns)]


class Scratch:
    """Columns of numbers in files of one folder, for data that does not fit into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, IO[bytes]] = {}

    def append(self, name: str, values: Integers) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("wb")
        values.tofile(self._files[name])

    def read(self, name: str, dtype: DTypeLike) -> Integers:
        """Map a complete column; empty if nothing was appended to it."""
        if name not in self._files:
            return np.empty(0, dtype)
        self._files.pop(name).close()
        path = self.folder / name
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

    def zeros(self, name: str, dtype: DTypeLike, length: int) -> Integers:
        """Make a column that can be written at any index. Raises OSError if the disk has no room for it."""
        if not length:
            return np.empty(0, dtype)
        path = self.folder / name
        if sys.platform == "linux":  # a mapped file without its blocks would kill the process on a full disk
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, length * np.dtype(dtype).itemsize)
            return np.memmap(path, dtype, "r+")
        return np.memmap(path, dtype, "w+", shape=(length,))

    def remove(self, prefix: str) -> None:
        """Delete the columns whose names begin with ``prefix``. Mapped columns stay usable until they are unmapped."""
        for path in self.folder.glob(f"{prefix}*"):
            path.unlink()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def blocks(length: int) -> Iterator[slice]:
    """Yield slices of `BLOCK` rows that cover a column."""
    return (slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))
