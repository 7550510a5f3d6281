"""Memory that the library reads and writes: arenas of packed weights, and the workspace of forwards."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from parlay.cache.pages import PageTable, zeros
from parlay.cache.prefixes import MoveRow
from parlay.compiled import structs

_LINE = 64  # bytes of a cache line
_CHUNK = 1 << 26
"""Bytes that are allocated from the system at a time. The system backs only pages that are written to."""
_CPU = torch.device("cpu")


class Arena(Protocol):
    """Allocates packed weights one behind the other, in the order in which forwards read them."""

    def take(self, count: int) -> int:
        """The address of ``count`` bytes, aligned to cache lines."""
        ...


class WeightArena(Arena):
    """Allocates from large pages of the system. The memory is zeroed, and lives as long as this object."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._left = 0
        self.taken = 0
        self._used: list[int] = []

    @property
    def parts(self) -> list[range]:
        """The addresses that are taken."""
        begins = [chunk.data_ptr() for chunk in self._chunks]
        return [range(begin, begin + used) for begin, used in zip(begins, self._used, strict=True)]

    def take(self, count: int) -> int:
        count += -count % _LINE
        self.taken += count
        if count > self._left:
            self._chunks.append(zeros((max(count, _CHUNK),), torch.uint8, _CPU))
            self._left = len(self._chunks[-1])
            self._used.append(0)
        begin = len(self._chunks[-1]) - self._left
        self._left -= count
        self._used[-1] += count
        return self._chunks[-1].data_ptr() + begin


class RegionArena(Arena):
    """Allocates from a region that the caller owns, from the address ``begin`` on. With 0 it only counts, and nothing
    may be written."""

    def __init__(self, begin: int = 0) -> None:
        self._begin, self.taken = begin, 0

    def take(self, count: int) -> int:
        self.taken += count + -count % _LINE
        return self._begin + self.taken - (count + -count % _LINE)


def whole_blocks(count: int) -> Tensor:
    """Allocate ``count`` zeroed bytes that are aligned for direct disk reads."""
    room = zeros((count + structs.STREAM_BLOCK,), torch.uint8, _CPU)
    begin = -room.data_ptr() % structs.STREAM_BLOCK
    return room[begin : begin + count]


class Workspace:
    """Working memory that the library's calls share; it begins at a cache line."""

    def __init__(self, core: structs.Core) -> None:
        self._core = core
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._start = self._size = 0

    def at_least(self, needed: int) -> int:
        """Return the address of at least ``needed`` bytes."""
        if self._size < needed:
            self._core.rest()  # a late thread may still read the old memory
            self._size = needed + needed // 4
            self._bytes = torch.empty(self._size + _LINE, dtype=torch.uint8)
            start = self._bytes.data_ptr()
            self._start = start + -start % _LINE
        return self._start


def row_mover(core: structs.Core, cached: torch.dtype) -> MoveRow:
    """The library's way to move rows of caches of this type; rows of 8-bit blocks are moved by torch."""
    if cached == torch.uint8:
        return PageTable.move

    def move(table: PageTable, source: int, to: int) -> None:
        layers, _, heads, _, _, size = table[0].memory.shape
        words = size * cached.itemsize // 4
        core.move_row(table.address, table.pitch, layers, heads, words, source, to)

    return move
