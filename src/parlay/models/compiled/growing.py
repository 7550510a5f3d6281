"""Reads and writes the library's calls that grow trees, and keeps the memory they work in."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.compiled import structs
from parlay.models.forward import GrownTree, TreeRequest


@dataclass(frozen=True, slots=True)
class TreeRequests:
    """The drafts that the texts of a call ask for, as the library reads them."""

    nodes: ctypes.Array[ctypes.c_int64]
    samplings: ctypes.Array[structs.Sampling]
    streams: ctypes.Array[ctypes.c_uint64]

    @staticmethod
    def of(requests: Sequence[TreeRequest], levels: int) -> TreeRequests:
        """Lay out requests for drafts of at most ``levels`` levels."""
        texts = len(requests)
        streams = (ctypes.c_uint64 * (texts * levels))()
        for text, request in enumerate(requests):
            streams[text * levels : text * levels + len(request.streams)] = list(request.streams)
        return TreeRequests(
            (ctypes.c_int64 * texts)(*[request.nodes for request in requests]),
            (structs.Sampling * texts)(*[_sampling(request) for request in requests]),
            streams,
        )

    def fill(self, call: structs.GrowthStruct) -> None:
        """Point the call at these requests."""
        call.budgets, call.streams = ctypes.addressof(self.nodes), ctypes.addressof(self.streams)
        call.samplings = ctypes.addressof(self.samplings)


def _sampling(request: TreeRequest) -> structs.Sampling:
    least = math.log(request.min_p) if request.min_p else -math.inf
    return structs.Sampling(request.temperature, request.top_k, request.top_p, least)


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Room for drafts of at most so many nodes each."""

    tokens: ctypes.Array[ctypes.c_int64]
    parents: ctypes.Array[ctypes.c_int64]
    chances: ctypes.Array[ctypes.c_double]
    ran: ctypes.Array[ctypes.c_int64]
    counts: ctypes.Array[ctypes.c_int64]
    most: int

    @staticmethod
    def of(segments: int, most: int) -> GrownTrees:
        """For so many segments. Raises ValueError for more nodes than the library takes."""
        if most > structs.MOST_DRAFT:
            raise ValueError(f"a draft of {most} nodes: {structs.MOST_DRAFT} at most")
        whole, real = ctypes.c_int64 * (segments * most), ctypes.c_double * (segments * most)
        return GrownTrees(whole(), whole(), real(), whole(), (ctypes.c_int64 * segments)(), most)

    def receive(self, call: structs.GrowthStruct) -> None:
        """Point the call's outputs here."""
        call.drafted, call.parents = ctypes.addressof(self.tokens), ctypes.addressof(self.parents)
        call.chances, call.ran = ctypes.addressof(self.chances), ctypes.addressof(self.ran)
        call.counts = ctypes.addressof(self.counts)

    def read(self) -> list[GrownTree]:
        """Read the drafts that a call has written."""
        return [self._grown(place * self.most, count) for place, count in enumerate(self.counts)]

    def _grown(self, first: int, count: int) -> GrownTree:
        own = slice(first, first + count)
        return GrownTree(
            tuple(self.tokens[own]), tuple(self.parents[own]), tuple(self.chances[own]), tuple(self.ran[own])
        )
