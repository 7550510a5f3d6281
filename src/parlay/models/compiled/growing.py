"""What the library writes when draft heads grow trees, and the memory that its calls work in."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from parlay.compiled import structs
from parlay.models.forward import Grown

_LINE = 64


class Room:
    """Memory of calls, kept from one to the next; it begins at a cache line."""

    def __init__(self, core: structs.Core) -> None:
        self._core = core
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._start = 0

    def at_least(self, needed: int) -> int:
        """The address of so many bytes."""
        if len(self._bytes) < needed + _LINE:
            self._core.rest()  # a late thread may still read the old ones
            self._bytes = torch.empty(needed + needed // 4 + _LINE, dtype=torch.uint8)
            start = self._bytes.data_ptr()
            self._start = start + -start % _LINE
        return self._start


@dataclass(frozen=True, slots=True)
class Drafts:
    """Room for drafts of at most so many nodes each."""

    tokens: ctypes.Array[ctypes.c_int64]
    parents: ctypes.Array[ctypes.c_int64]
    chances: ctypes.Array[ctypes.c_double]
    counts: ctypes.Array[ctypes.c_int64]
    most: int

    @staticmethod
    def of(segments: int, most: int) -> Drafts:
        """For so many segments. Raises ValueError for more nodes than the library takes."""
        if most > structs.MOST_DRAFT:
            raise ValueError(f"a draft of {most} nodes: {structs.MOST_DRAFT} at most")
        whole, real = ctypes.c_int64 * (segments * most), ctypes.c_double * (segments * most)
        return Drafts(whole(), whole(), real(), (ctypes.c_int64 * segments)(), most)

    def written_by(self, call: structs.Growth) -> None:
        """Have the call write here."""
        call.drafted, call.parents = ctypes.addressof(self.tokens), ctypes.addressof(self.parents)
        call.chances, call.counts = ctypes.addressof(self.chances), ctypes.addressof(self.counts)

    def read(self) -> list[Grown]:
        """What a call has written."""
        return [self._grown(place * self.most, count) for place, count in enumerate(self.counts)]

    def _grown(self, first: int, count: int) -> Grown:
        own = slice(first, first + count)
        return Grown(tuple(self.tokens[own]), tuple(self.parents[own]), tuple(self.chances[own]))
