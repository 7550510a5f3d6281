"""Arguments and results of the library's calls that grow draft trees, and the memory of these calls."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from parlay.compiled import structs
from parlay.models.compiled.layout import lay_out_texts
from parlay.models.compiled.memory import Workspace
from parlay.models.compiled.newest_tokens import NewestTokens, tenant
from parlay.models.compiled.product import check_inputs
from parlay.models.forward import ForwardBatch, GrownTree, Growth, TreeRequest
from parlay.types import PickedRows

_READ = {torch.float32, torch.bfloat16}
"""Types of features that the library reads."""
_BYTES = 8  # of a number in the arrays


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """The features of a call's rows: the ``addresses`` at which they lie, as float32 or, if ``form`` is 1, bfloat16."""

    addresses: list[int]
    form: int
    pieces: Sequence[PickedRows]
    """Keeps the memory of the addresses alive."""

    @staticmethod
    def of(first: structs.Linear, features: Sequence[PickedRows], rows: int) -> FeatureRows:
        """Find the features of a call's ``rows`` rows, which the matrix ``first`` multiplies.

        Raises ValueError for another number or size of them.
        """
        pieces, addresses = _of_one_type(features), list[int]()
        for all_NF, picked in pieces:
            check_inputs(first, all_NF)
            if picked and not 0 <= min(picked) <= max(picked) < all_NF.shape[0]:
                raise ValueError(f"rows {list(picked)} of {all_NF.shape[0]} features")
            begin, each = all_NF.data_ptr(), all_NF.stride(0) * all_NF.itemsize
            addresses += [begin + row * each for row in picked]
        if len(addresses) != rows:
            raise ValueError(f"features of {len(addresses)} rows for {rows} rows")
        return FeatureRows(addresses, int(bool(pieces) and pieces[0].all_NF.dtype == torch.bfloat16), pieces)


NO_FEATURES = FeatureRows([], 0, ())


def _of_one_type(pieces: Sequence[PickedRows]) -> Sequence[PickedRows]:
    """The pieces as they are if all are float32 or all bfloat16, one number behind the other; else copies in
    float32."""
    types = {all_NF.dtype for all_NF, _ in pieces}
    if len(types) == 1 and types <= _READ and all(all_NF.stride(-1) == 1 for all_NF, _ in pieces):
        return pieces
    return [PickedRows(piece.gathered().float().contiguous(), range(len(piece.rows))) for piece in pieces]


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Output arrays for drafts of at most ``most`` nodes each.

    ``numbers``: the tokens of all drafts, their parents, the rows that ran, and how many nodes each draft has.
    """

    numbers: array[int]
    chances: array[float]
    most: int

    @staticmethod
    def of(segments: int, most: int) -> GrownTrees:
        """Allocate them for ``segments`` drafts. Raises ValueError if ``most`` is more than the library takes."""
        if not 0 < most <= structs.MOST_DRAFT:
            raise ValueError(f"a draft of {most} nodes: 1 at least, and {structs.MOST_DRAFT} at most")
        nodes = _BYTES * segments * most
        return GrownTrees(array("q", bytes(3 * nodes + _BYTES * segments)), array("d", bytes(nodes)), most)

    def receive(self, call: structs.GrowthStruct) -> None:
        """Point the call's outputs here."""
        call.drafted, nodes = self.numbers.buffer_info()[0], _BYTES * len(self.chances)
        call.parents, call.ran, call.counts = (call.drafted + place * nodes for place in (1, 2, 3))
        call.chances = self.chances.buffer_info()[0]

    def read(self) -> list[GrownTree]:
        """Read the drafts that a call has written."""
        nodes = len(self.chances)
        return [self._grown(place * self.most, count) for place, count in enumerate(self.numbers[3 * nodes :])]

    def _grown(self, first: int, count: int) -> GrownTree:
        tokens, parents, ran = (
            tuple(self.numbers[place + first : place + first + count])
            for place in (0, len(self.chances), 2 * len(self.chances))
        )
        return GrownTree(tokens, parents, tuple(self.chances[first : first + count]), ran)


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
        _check(model, growth, requests, tokens_D)
        rows, segments, most = len(work.ids), len(work.places), max([request.nodes for request in requests])
        laid, features = lay_out_texts(work.places), NO_FEATURES
        if growth.head is not None:
            features = FeatureRows.of(growth.head.first, growth.head.features, rows)
        given, (ids, call_features, budgets, ends, ends_from, asking, texts, lengths) = _one_behind_the_other(
            work.ids, features.addresses, *_columns(requests)
        )
        wanted, samplings = array("i", work.wanted), (structs.Sampling * segments)(*map(_sampling, requests))
        batch = structs.Batch(rows, segments, segments, threads, ids=ids, segment=laid)
        batch.wanted_rows = wanted.buffer_info()[0]
        call, stopped = structs.GrowthStruct(growth.levels, growth.width, most), ctypes.c_int32(0)
        call.least, call.embedded, call.tokens = growth.least, growth.head is None, tokens_D.data_ptr()
        if growth.head is not None:
            call.first, call.features = ctypes.addressof(growth.head.first), call_features
            call.features_form = features.form
        if newest is not None:
            call.slots, call.tenants, call.asking = newest.slots, newest.tenants_S.data_ptr(), asking
        call.budgets, call.ends, call.ends_from = budgets, ends, ends_from
        call.texts, call.lengths = texts, lengths
        streams = _streams(requests, growth.levels)
        call.samplings, call.streams = ctypes.addressof(samplings), streams.buffer_info()[0]
        grown = GrownTrees.of(segments, most)
        grown.receive(call)
        if beside:
            call.stop = ctypes.addressof(stopped)
        call.memory = space.at_least(core.growth_bytes(ctypes.byref(model), ctypes.byref(batch), ctypes.byref(call)))
        read = laid, given, wanted, samplings, streams, features, growth.head, tokens_D, newest, requests
        return GrowthCall(core, model, batch, call, grown, stopped, read)

    def run(self) -> list[GrownTree]:
        """Grow the trees."""
        self.core.grow(ctypes.byref(self.model), ctypes.byref(self.batch), ctypes.byref(self.growth))
        return self.grown.read()

    def stop(self) -> None:
        """Let a call that runs beside others begin no further level. Any thread may call this."""
        self.stopped.value = 1


def read_text(
    model: structs.ModelStruct,
    work: ForwardBatch,
    first: structs.Linear,
    features: Sequence[PickedRows],
    *,
    core: structs.Core,
    space: Workspace,
    threads: int,
) -> None:
    """Store the keys and values of a draft head's rows of a text, whose inputs ``first`` makes from their features.

    Nothing else of the rows is computed. Raises ValueError for sizes that don't match the model.
    """
    if first.outputs != model.hidden:
        raise ValueError(f"features made into {first.outputs} numbers, for rows of {model.hidden}")
    rows, laid = len(work.ids), lay_out_texts(work.places)
    found = FeatureRows.of(first, features, rows)
    given, (ids, addresses) = _one_behind_the_other(work.ids, found.addresses)
    batch = structs.Batch(rows, len(work.places), 0, threads, ids=ids, segment=laid)
    call = structs.GrowthStruct(0, 1, features=addresses, features_form=found.form, first=ctypes.addressof(first))
    pointers = ctypes.byref(model), ctypes.byref(batch), ctypes.byref(call)
    call.memory = space.at_least(core.growth_bytes(*pointers))
    core.grow(*pointers)
    del given  # kept alive until the call has returned


def _one_behind_the_other(*parts: Sequence[int]) -> tuple[array[int], list[int]]:
    """One array of the numbers of all parts, and the address of each part in it."""
    numbers = array("q", chain.from_iterable(parts))
    address, found = numbers.buffer_info()[0], list[int]()
    for part in parts:
        found.append(address)
        address += _BYTES * len(part)
    return numbers, found


def _columns(requests: Sequence[TreeRequest]) -> tuple[Sequence[int], ...]:
    """The requests' nodes, the tokens that end their texts, where each request's begin among these, their tenants, and
    addresses and lengths of their texts."""
    ends = [token for request in requests for token in request.ends]
    ends_from = [0, *accumulate([len(request.ends) for request in requests])]
    nodes, tenants = [request.nodes for request in requests], [tenant(request.salt) for request in requests]
    texts, lengths = zip(*[request.text.buffer_info() for request in requests], strict=True)
    return nodes, ends, ends_from, tenants, texts, lengths


def _streams(requests: Sequence[TreeRequest], levels: int) -> array[int]:
    """The noise streams ``[requests, levels]``; empty if no request samples."""
    if not any(request.streams for request in requests):
        return array("Q")
    return array("Q", [stream for request in requests for stream in (*request.streams, *[0] * levels)[:levels]])


def _sampling(request: TreeRequest) -> structs.Sampling:
    least = math.log(request.min_p) if request.min_p else -math.inf
    return structs.Sampling(request.temperature, request.top_k, request.top_p, least)


def _check(model: structs.ModelStruct, growth: Growth, requests: Sequence[TreeRequest], tokens_D: Tensor) -> None:
    """Raises ValueError for arguments that would make the library read or write out of bounds; see `GrowthCall.of`."""
    if not 0 < growth.width <= structs.MOST_CHILDREN or growth.levels < 1:
        raise ValueError(
            f"{growth.levels} levels of {growth.width} rows: 1 level at least, of 1 to {structs.MOST_CHILDREN} rows"
        )
    if min([request.nodes for request in requests]) < 1:
        raise ValueError("a draft of no nodes: 1 at least")
    if tokens_D.shape[0] != model.vocab:
        raise ValueError(f"{len(tokens_D)} tokens for {model.vocab} outputs of the draft model")
    if growth.head is not None and growth.head.first.outputs != model.hidden:
        raise ValueError(f"features made into {growth.head.first.outputs} numbers, for rows of {model.hidden}")
