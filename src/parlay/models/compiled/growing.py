"""Arguments and results of the library's calls that grow draft trees, and the memory of these calls."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from parlay.compiled import structs
from parlay.models.compiled.layout import lay_out_texts
from parlay.models.compiled.memory import Workspace
from parlay.models.compiled.newest_tokens import NewestTokens, tenant
from parlay.models.compiled.product import check_inputs
from parlay.models.forward import ForwardBatch, GrownTree, Growth, TreeRequest


@dataclass(frozen=True, slots=True)
class TreeRequests:
    """The draft requests of a call's texts, as the library reads them."""

    nodes: ctypes.Array[ctypes.c_int64]
    samplings: ctypes.Array[structs.Sampling]
    streams: ctypes.Array[ctypes.c_uint64]
    ends: ctypes.Array[ctypes.c_int64]
    ends_from: ctypes.Array[ctypes.c_int64]

    @staticmethod
    def of(requests: Sequence[TreeRequest], levels: int) -> TreeRequests:
        """Lay out requests for drafts of at most ``levels`` levels."""
        texts = len(requests)
        streams = (ctypes.c_uint64 * (texts * levels))()
        for text, request in enumerate(requests):
            streams[text * levels : text * levels + len(request.streams)] = list(request.streams)
        ends = [token for request in requests for token in request.ends]
        return TreeRequests(
            (ctypes.c_int64 * texts)(*[request.nodes for request in requests]),
            (structs.Sampling * texts)(*[_sampling(request) for request in requests]),
            streams,
            (ctypes.c_int64 * len(ends))(*ends),
            (ctypes.c_int64 * (texts + 1))(0, *accumulate(len(request.ends) for request in requests)),
        )

    def fill(self, call: structs.GrowthStruct) -> None:
        """Point the call at these requests."""
        call.budgets, call.streams = ctypes.addressof(self.nodes), ctypes.addressof(self.streams)
        call.samplings = ctypes.addressof(self.samplings)
        call.ends, call.ends_from = ctypes.addressof(self.ends), ctypes.addressof(self.ends_from)


def _sampling(request: TreeRequest) -> structs.Sampling:
    least = math.log(request.min_p) if request.min_p else -math.inf
    return structs.Sampling(request.temperature, request.top_k, request.top_p, least)


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Output arrays for drafts of at most ``most`` nodes each."""

    tokens: ctypes.Array[ctypes.c_int64]
    parents: ctypes.Array[ctypes.c_int64]
    chances: ctypes.Array[ctypes.c_double]
    ran: ctypes.Array[ctypes.c_int64]
    counts: ctypes.Array[ctypes.c_int64]
    most: int

    @staticmethod
    def of(segments: int, most: int) -> GrownTrees:
        """Allocate them for ``segments`` drafts. Raises ValueError if ``most`` is more than the library takes."""
        if not 0 < most <= structs.MOST_DRAFT:
            raise ValueError(f"a draft of {most} nodes: 1 at least, and {structs.MOST_DRAFT} at most")
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


@dataclass(frozen=True, slots=True)
class GrowthCall:
    """A call of the library that grows trees, with all that it reads and writes. Any thread may run it, once.

    Other calls that use the same workspace must wait for it.
    """

    core: structs.Core
    model: structs.ModelStruct
    batch: structs.Batch
    growth: structs.GrowthStruct
    grown: GrownTrees
    stopped: ctypes.c_int32
    read: tuple[object, ...]
    """Keeps the memory alive that the structs point to."""

    @staticmethod
    def of(
        model: structs.ModelStruct,
        work: ForwardBatch,
        growth: Growth,
        requests: Sequence[TreeRequest],
        *,
        tokens_D: Tensor,
        newest: NewestTokens | None,
        core: structs.Core,
        space: Workspace,
        threads: int,
        beside: bool,
    ) -> GrowthCall:
        """Lay out the call. ``tokens_D`` are the target's token ids of the draft head's or draft model's outputs, of
        which the last ones may be ``newest``.

        Raises ValueError for more than the library has room for, and for sizes that don't match the model.
        """
        _check(model, growth, requests, tokens_D, len(work.ids))
        rows, segments, most = len(work.ids), len(work.places), max([request.nodes for request in requests])
        laid, ids = lay_out_texts(work.places), (ctypes.c_int64 * rows)(*work.ids)
        wanted, asked = (ctypes.c_int32 * segments)(*work.wanted), TreeRequests.of(requests, growth.levels)
        batch = structs.Batch(rows, segments, segments, threads)
        batch.ids, batch.segment, batch.wanted_rows = ctypes.addressof(ids), laid, ctypes.addressof(wanted)
        call, stopped = structs.GrowthStruct(growth.levels, growth.width, most), ctypes.c_int32(0)
        call.least, call.embedded, call.tokens = growth.least, growth.head is None, tokens_D.data_ptr()
        if growth.head is not None:
            call.first, call.features = ctypes.addressof(growth.head.first), growth.head.features_NF.data_ptr()
        tenants = (ctypes.c_int64 * segments)(*[tenant(request.salt) for request in requests])
        if newest is not None:
            call.slots, call.tenants = len(newest.tenants_S), newest.tenants_S.data_ptr()
            call.asking = ctypes.addressof(tenants)
        grown = GrownTrees.of(segments, most)
        asked.fill(call)
        grown.receive(call)
        if beside:
            call.stop = ctypes.addressof(stopped)
        pointers = ctypes.byref(model), ctypes.byref(batch), ctypes.byref(call)
        call.memory = space.at_least(core.growth_bytes(*pointers))
        read = laid, ids, wanted, asked, growth.head, tokens_D, newest, tenants
        return GrowthCall(core, model, batch, call, grown, stopped, read)

    def run(self) -> list[GrownTree]:
        """Grow the trees."""
        self.core.grow(ctypes.byref(self.model), ctypes.byref(self.batch), ctypes.byref(self.growth))
        return self.grown.read()

    def stop(self) -> None:
        """Let a call that runs beside others begin no further level. Any thread may call this."""
        self.stopped.value = 1


def _check(
    model: structs.ModelStruct, growth: Growth, requests: Sequence[TreeRequest], tokens_D: Tensor, rows: int
) -> None:
    """Raises ValueError for arguments that would make the library read or write out of bounds; see `GrowthCall.of`."""
    if not 0 < growth.width <= structs.MOST_CHILDREN or growth.levels < 1:
        raise ValueError(
            f"{growth.levels} levels of {growth.width} rows: 1 level at least, of 1 to {structs.MOST_CHILDREN} rows"
        )
    if min([request.nodes for request in requests]) < 1:
        raise ValueError("a draft of no nodes: 1 at least")
    if len(tokens_D) != model.vocab:
        raise ValueError(f"{len(tokens_D)} tokens for {model.vocab} outputs of the draft model")
    if growth.head is None:
        return
    check_inputs(growth.head.first, growth.head.features_NF)
    if len(growth.head.features_NF) != rows or growth.head.first.outputs != model.hidden:
        raise ValueError(
            f"features of {len(growth.head.features_NF)} rows, made into {growth.head.first.outputs} numbers, for "
            f"{rows} rows of {model.hidden}"
        )
