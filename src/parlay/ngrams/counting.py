"""Counts the n-grams of texts of any size: sorts runs that fit into memory, and merges them on disk into one trie.

An n-gram is packed into words of 64 bits with the first id in the highest bits, so that sorting the numbers sorts the
n-grams. N-grams that the end of a text cuts off are filled up with `PAD`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from parlay.ngrams.trie import END, PAD, Integers, Scratch, Trie

LONGEST = 10
"""The most ids of an n-gram that can be counted."""

_RANK_BITS = 24  # bits of an n-gram's later words that hold the rank of the words before it
_MOST_ROWS = 1 << _RANK_BITS
_LEAST_ROWS = 1 << 10
_ROW_BYTES = 112  # memory for each row of a run while it is sorted or merged
_COUNT = np.dtype("<i8")
_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """The n-grams of some texts. ``counts[n - 1]``: the number of occurrences of each n-gram of n ids."""

    trie: Trie
    counts: tuple[Integers, ...]


@dataclass(frozen=True, slots=True)
class _Packing:
    """How n-grams are packed: ``parts[i]`` ids of ``bits`` bits each are in word i."""

    bits: int
    parts: tuple[int, ...]

    @classmethod
    def of(cls, size: int, order: int) -> Self:
        bits = max(1, (size - 1).bit_length())
        parts = [min(order, 64 // bits)]
        while sum(parts) < order:
            parts.append(min(order - sum(parts), (64 - _RANK_BITS) // bits))
        return cls(bits, tuple(parts))

    def pack(self, ids: Integers) -> list[Integers]:
        """Pack the n-grams that begin at each id except the last order - 1 ids; ids after `END` become `PAD`."""
        rows = len(ids) - sum(self.parts) + 1
        ids, inside = ids.astype(np.uint64), np.ones(rows, np.uint64)
        words, ahead = [], 0
        for part in self.parts:
            word = np.zeros(rows, np.uint64)
            for _ in range(part):
                column = ids[ahead : ahead + rows] * inside
                word <<= np.uint64(self.bits)
                word |= column
                inside &= column != END
                ahead += 1
            words.append(word)
        return words

    def unpack(self, words: Sequence[Integers]) -> Iterator[Integers]:
        """Yield the columns of ids."""
        mask = np.uint64((1 << self.bits) - 1)
        for word, part in zip(words, self.parts, strict=True):
            for place in reversed(range(part)):
                yield ((word >> np.uint64(place * self.bits)) & mask).astype(np.int64)

    def group(self, words: Sequence[Integers]) -> tuple[Integers, Integers]:
        """Return the order that sorts the n-grams, and the first place in that order of each distinct n-gram."""
        order = np.argsort(words[0])
        changed = _changes(words[0][order])
        for word, part in zip(words[1:], self.parts[1:], strict=True):
            ranks, keys = np.cumsum(changed).astype(np.uint64), word[order]
            if int(ranks[-1]) < _MOST_ROWS:
                keys |= ranks << np.uint64(part * self.bits)
                within = np.argsort(keys)
                changed = _changes(keys[within])
            else:  # more rows than the rank's bits can count
                within = np.lexsort((keys, ranks))
                changed = _changes(keys[within]) | _changes(ranks[within])
            order = order[within]
        return order, np.flatnonzero(changed)


def count(
    ids: Integers, size: int, order: int, scratch: Scratch, *, memory: int, counted: Callable[[int], object] = bool
) -> Counted:
    """Count the n-grams of 1 to ``order`` ids in about ``memory`` bytes.

    ``counted`` is called with the number of ids just done. ``ids`` are below ``size`` and may be memory-mapped; every
    text in them begins with `BEGIN` and ends with `END`.
    """
    packing = _Packing.of(size, order)
    most = max(_LEAST_ROWS, min(memory // _ROW_BYTES, _MOST_ROWS))
    runs = 0
    for start in range(0, len(ids), most):
        block = ids[start : start + most + order - 1]
        rows = min(most, len(ids) - start)
        _save_run(packing, np.pad(block, (0, rows + order - 1 - len(block))), f"run{runs}.", scratch)
        runs += 1
        counted(rows)
    return _merge(packing, size, [f"run{run}." for run in range(runs)], scratch, most)


def _save_run(packing: _Packing, ids: Integers, name: str, scratch: Scratch) -> None:
    words = packing.pack(ids)
    order, heads = packing.group(words)
    for part, word in enumerate(words):
        scratch.append(f"{name}{part}", word[order[heads]])
    scratch.append(f"{name}counts", np.diff(heads, append=len(order)).astype(_COUNT))


def _merge(packing: _Packing, size: int, names: Sequence[str], scratch: Scratch, most: int) -> Counted:
    """Merge the runs, one range of n-grams at a time, so that no n-gram is in two ranges."""
    parts = range(len(packing.parts))
    runs = [[scratch.read(f"{name}{part}", np.uint64) for part in parts] for name in names]
    counts = [scratch.read(f"{name}counts", _COUNT) for name in names]
    levels = _Levels(sum(packing.parts), size, scratch)
    for begins, ends in _partitions(packing, runs, [0] * len(runs), [len(run[0]) for run in runs], most):
        cuts = list(map(slice, begins, ends))
        words = [np.concatenate([run[part][cut] for run, cut in zip(runs, cuts, strict=True)]) for part in parts]
        times = np.concatenate([each[cut] for each, cut in zip(counts, cuts, strict=True)])
        if len(runs) > 1:
            order, heads = packing.group(words)
            times = np.add.reduceat(times[order], heads)
            words = [word[order[heads]] for word in words]
        levels.add(packing.unpack(words), times)
    del runs, counts
    scratch.remove("run")
    return levels.counted()


def _partitions(
    packing: _Packing, runs: Sequence[Sequence[Integers]], begins: list[int], ends: list[int], most: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Divide the rows of sorted runs into parts of at most ``most`` rows. Yields where each part begins and ends in
    each run.

    The parts end at n-grams from an even sample of about ``most`` / 4 rows. A part that is too long is divided again.
    Only a part that holds a single n-gram may have more than ``most`` rows.
    """
    total = sum(ends) - sum(begins)
    if total <= most:
        yield begins, ends
        return
    apart, keys, before = -(-total // max(1, most // 4)), [np.empty(0, np.uint64)], np.zeros(1, np.int64)
    while len(keys[0]) < 2 and apart:
        keys, before = _sample(packing, runs, [slice(*each, apart) for each in zip(begins, ends, strict=True)])
        apart //= 2
    step = max(1, int(before[-1]) * most // (2 * total))
    cuts = np.unique(np.searchsorted(before, np.arange(step, before[-1], step), "right") - 1)
    for cut in cuts[cuts > 0].tolist() or range(1, min(2, len(keys[0]))):
        key, within = [int(word[cut]) for word in keys], zip(runs, begins, ends, strict=True)
        until = [_before(run, key, low, high) for run, low, high in within]
        yield from _partitions(packing, runs, begins, until, most)
        begins = until
    if len(keys[0]) > 1:
        yield from _partitions(packing, runs, begins, ends, most)
    else:
        yield begins, ends


def _sample(
    packing: _Packing, runs: Sequence[Sequence[Integers]], rows: Sequence[slice]
) -> tuple[list[Integers], Integers]:
    """Return the distinct n-grams among some rows of the runs, sorted, and how many rows precede each, with the number
    of all rows last."""
    words = [
        np.concatenate([word[each] for word, each in zip(part, rows, strict=True)]) for part in zip(*runs, strict=True)
    ]
    order, heads = packing.group(words)
    return [word[order[heads]] for word in words], np.append(heads, len(order))


def _before(run: Sequence[Integers], key: Sequence[int], low: int, high: int) -> int:
    """Return the first row from ``low`` to ``high`` of a sorted run that does not come before the n-gram ``key``."""
    for word, own in zip(run, key, strict=True):
        within = word[low:high]
        low, high = (low + int(np.searchsorted(within, np.uint64(own), side)) for side in _SIDES)
    return low


class _Levels:
    """Writes the columns of a trie from sorted n-grams."""

    def __init__(self, order: int, size: int, scratch: Scratch) -> None:
        self._order, self._size, self._scratch = order, size, scratch
        self._written = [0] * (order + 1)
        self._latest = [-1] * (order + 1)  # ids of the last n-gram
        self._open = [
            np.empty(0, _COUNT) for _ in range(order + 1)
        ]  # the last count of each length, to which the next call may add

    def add(self, columns: Iterator[Integers], counts: Integers) -> None:
        """Add n-grams.

        ``columns`` are the ids of distinct n-grams, sorted. All of them sort after the n-grams of earlier calls.
        """
        changed, rows_before, goes_on = np.zeros(len(counts), bool), np.zeros(0, np.int64), True
        for n, column in enumerate(columns, 1):
            changed |= _changes(column)
            goes_on = goes_on and column[0] == self._latest[n]
            changed[0] = not goes_on
            rows, self._latest[n] = np.flatnonzero(changed), int(column[-1])
            more = int(
                counts[: rows[0] if len(rows) else None].sum()
            )  # further occurrences of the last n-gram of the call before
            real = column[rows] != PAD
            sums, rows = np.add.reduceat(counts, rows)[real] if len(rows) else counts[:0], rows[real]
            self._count(n, more, sums)
            if n > 1:
                self._scratch.append(f"starts{n - 1}", self._written[n] + np.searchsorted(rows, rows_before))
            self._scratch.append(f"tokens{n}", column[rows].astype(np.uint32))
            self._written[n] += len(rows)
            rows_before = rows

    def _count(self, n: int, more: int, sums: Integers) -> None:
        """Add ``more`` to the open count, and write all counts but the last. The last one stays open, as later calls
        may add to it."""
        sums = np.concatenate([self._open[n] + more, sums])
        self._scratch.append(f"counts{n}", sums[:-1])
        self._open[n] = sums[-1:]

    def counted(self) -> Counted:
        read, orders = self._scratch.read, range(1, self._order + 1)
        for n in orders:
            self._scratch.append(f"counts{n}", self._open[n])
        for n in orders[:-1]:
            self._scratch.append(f"starts{n}", np.array([self._written[n + 1]]))
        tokens = [read(f"tokens{n}", np.uint32) for n in orders]
        counts = [read(f"counts{n}", _COUNT) for n in orders]
        starts = [read(f"starts{n}", np.int64) for n in orders[:-1]]
        seen, tokens[0] = tokens[0], np.empty(0, np.uint32)
        of_ids = np.zeros(self._size, _COUNT)
        of_ids[seen] = counts[0]
        if starts:
            families = np.zeros(self._size + 1, np.int64)
            families[1 + seen.astype(np.int64)] = np.diff(starts[0])
            starts[0] = np.cumsum(families)
        return Counted(Trie(self._size, tuple(tokens), tuple(starts)), (of_ids, *counts[1:]))


def _changes(values: Integers) -> Integers:
    """Mark the values that differ from the value before them. The first value is always marked."""
    changed = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=changed[1:])
    return changed
