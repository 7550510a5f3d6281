"""What the library writes when draft heads grow trees, and the memory that its calls work in."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parlay.compiled import structs
from parlay.models.forward import GrownTree, TreeRequest

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
class Asked:
    """What the texts of a call wish, as the library reads it."""

    nodes: ctypes.Array[ctypes.c_int64]
    temperatures: ctypes.Array[ctypes.c_float]
    streams: ctypes.Array[ctypes.c_uint64]

    @staticmethod
    def of(wishes: Sequence[TreeRequest], levels: int) -> Asked:
        """Of drafts with at most so many levels."""
        texts = len(wishes)
        streams = (ctypes.c_uint64 * (texts * levels))()
        for text, wish in enumerate(wishes):
            streams[text * levels : text * levels + len(wish.streams)] = list(wish.streams)
        nodes, temperatures = (ctypes.c_int64 * texts), (ctypes.c_float * texts)
        return Asked(
            nodes(*[wish.nodes for wish in wishes]), temperatures(*[wish.temperature for wish in wishes]), streams
        )

    def told(self, call: structs.Growth) -> None:
        """Have the call read it."""
        call.budgets, call.streams = ctypes.addressof(self.nodes), ctypes.addressof(self.streams)
        call.temperatures = ctypes.addressof(self.temperatures)


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

    def read(self) -> list[GrownTree]:
        """What a call has written."""
        return [self._grown(place * self.most, count) for place, count in enumerate(self.counts)]

    def _grown(self, first: int, count: int) -> GrownTree:
        own = slice(first, first + count)
        return GrownTree(tuple(self.tokens[own]), tuple(self.parents[own]), tuple(self.chances[own]))
