"""The segments of one library call: where their rows lie, what else they see, and which rows join at a later layer."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from parlay.cache import BLOCK, Rows
from parlay.cache.pages import CODES, CacheShape, Page, pages_for
from parlay.compiled import structs
from parlay.models.compiled.adapters import firsts_of_experts
from parlay.models.config import DecoderConfig
from parlay.models.forward import ForwardBatch, LayerPages, SegmentFeatures
from parlay.types import Prefix, trees

T = TypeVar("T")


class _Span(NamedTuple):
    """Rows ``first`` to ``end`` of the segment ``place``, which run as rows of the batch from ``begin`` on."""

    place: int
    first: int
    end: int
    begin: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The segments of a batch; rows that join late come last, in segments of their own.

    ``order`` is the batch row of each row of the work; None if they are the same. ``joining`` describes each late row's
    join, and ``pointed`` keeps the memory alive that the structs point to.
    """

    segments: ctypes.Array[structs.SegmentStruct]
    order: Sequence[int] | None
    late_segments: int
    join: int
    joining: ctypes.Array[structs.Joining]
    pointed: list[object]

    def rows_of(self, rows: Sequence[int]) -> Sequence[int]:
        """The batch rows of these rows of the work."""
        return rows if self.order is None else [self.order[row] for row in rows]

    def arranged(self, each: Sequence[T]) -> Sequence[T]:
        """Reorder values, one for each row of the work, to the order of the batch rows."""
        if self.order is None:
            return each
        made = list(each)
        for row, own in zip(self.order, each, strict=True):
            made[row] = own
        return made


class Prefixes:
    """Trained prefixes as the library reads them: in pages like a sequence's, in the cache's type, made once for
    each."""

    def __init__(self, dtype: torch.dtype, lanes: int) -> None:
        """``dtype`` and ``lanes`` are those of `CacheShape`."""
        self._dtype, self._lanes = dtype, lanes
        self._packed_by: WeakKeyDictionary[Prefix, tuple[structs.PrefixStruct, object]] = WeakKeyDictionary()

    def pointer(self, prefix: Prefix) -> ctypes._Pointer[structs.PrefixStruct]:
        if prefix not in self._packed_by:
            self._packed_by[prefix] = self._paged(prefix.states)
        return ctypes.pointer(self._packed_by[prefix][0])

    def _paged(self, states_LSKPD: Tensor) -> tuple[structs.PrefixStruct, object]:
        layers, _, heads, keys, size = states_LSKPD.shape
        shape = CacheShape(
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=size,
            dtype=self._dtype,
            device=states_LSKPD.device,
            lanes=self._lanes,
        )
        memory = torch.zeros(*shape.size[:3], pages_for(keys), *shape.size[3:], dtype=self._dtype)
        pages = [Page(memory, number, self._lanes) for number in range(memory.shape[3])]
        for slot, states_LSKD in enumerate(states_LSKPD.unbind(3)):
            page, place = pages[slot // BLOCK], slot % BLOCK
            if self._dtype == torch.uint8:
                write_in_blocks(page.row(place), states_LSKD)
            else:
                page.write(place, states_LSKD)
        addresses = (ctypes.c_void_p * len(pages))(*(page.address for page in pages))
        return structs.PrefixStruct(ctypes.addressof(addresses), pages[0].pitch, keys), (memory, addresses)


def _hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix by which blocks of keys and queries are multiplied; ``size`` is a power of
    two."""
    made = torch.ones(1, 1)
    while len(made) < size:
        made = torch.cat((torch.cat((made, made), 1), torch.cat((made, -made), 1)))
    return made / math.sqrt(size)


def write_in_blocks(row: Sequence[Tensor], states_LSKD: Tensor) -> None:
    """Quantize one token's key and value to eight-bit blocks, and write them to its `row` of the pages."""
    blocks = states_LSKD.float().view(*states_LSKD.shape[:-1], -1, CODES).clone()
    blocks[:, 0] = blocks[:, 0] @ _hadamard(CODES)
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.where(largest > 0, 127 / largest, 0)).round().to(torch.int8).view(torch.uint8)
    scales = (largest / 127).half().view(torch.uint8)
    for (to_codes, to_scales), which in zip((row[:2], row[2:]), (0, 1), strict=True):
        to_codes.copy_((codes[:, which] ^ (0 if which else 128)).reshape(to_codes.shape))
        to_scales.copy_(scales[:, which])


def lay_out(work: ForwardBatch, prefixes: Prefixes) -> BatchLayout:
    """Lay out the segments of a batch. Raises ValueError if rows join at several layers."""
    joins = [given for given in work.features if given.features.join]
    spans = _spans(work.places, {given.place: len(given.features) for given in joins})
    laid = (structs.SegmentStruct * len(spans))()
    pointed: list[object] = []
    rows: list[list[int]] = [[] for _ in work.places]
    last_of = {}
    for number, span in enumerate(spans):
        _fill(laid[number], work.places[span.place], span, pointed)
        if work.tokens:
            _name(laid[number], work.places[span.place], work.tokens[span.place], pointed)
        rows[span.place] += range(span.begin, span.begin + span.end - span.first)
        last_of[span.place] = laid[number]
    for given in work.features:
        if given.features.prefix is not None:
            last_of[given.place].prefix = prefixes.pointer(given.features.prefix)
            last_of[given.place].seers = len(given.features)
    order = [row for each in rows for row in each] if joins else None
    return BatchLayout(laid, order, len(joins), _layer(joins), _joining(joins, order or ()), pointed)


def lay_out_texts(places: Sequence[Rows]) -> ctypes.Array[structs.SegmentStruct]:
    """Segments of pending tokens only: no trees, features or prefixes."""
    laid, begin = (structs.SegmentStruct * len(places))(), 0
    for at, place in zip(laid, places, strict=True):
        _point(at, place)
        at.start, at.pending, at.begin = place.start, place.pending, begin
        begin += place.pending
    return laid


def _point(at: structs.SegmentStruct, place: Rows) -> None:
    """Point a segment at its pages."""
    at.pages, at.pitch = place.table.address, place.table.pitch
    if place.recent is not None:
        at.recent, at.recent_pitch = place.recent.address, place.recent.pitch


def _spans(places: Sequence[Rows], late: dict[int, int]) -> list[_Span]:
    """Each segment's rows without its late ones, in order; then the late rows."""
    parts = [(at, place.base, place.end - late.get(at, 0)) for at, place in enumerate(places)]
    parts += [(at, places[at].end - count, places[at].end) for at, count in late.items()]
    spans: list[_Span] = []
    begin = 0
    for at, first, end in parts:
        spans.append(_Span(at, first, end, begin))
        begin += end - first
    return spans


def _fill(at: structs.SegmentStruct, place: Rows, span: _Span, pointed: list[object]) -> None:
    """Fill in one segment; the memory that it points to is added to ``pointed``."""
    as_text = span.first == place.base and span.end == place.end and trees.is_chain(place.tree)
    nodes = 0 if as_text else max(0, span.end - place.pending)
    _point(at, place)
    at.start = place.start
    at.pending, at.nodes = span.end - nodes, nodes  # a chain is handled as more of the text
    at.base, at.begin = span.first, span.begin - span.first
    at.together, at.block = place.together, place.block
    at.hidden_from, at.hidden_to = place.hidden
    if place.places:
        root = place.start + place.pending - 1
        places = (ctypes.c_int64 * len(place.places))(*(root + distance for distance in place.places))
        at.places, at.placed = ctypes.addressof(places), len(places)
        pointed.append(places)
    if place.chosen is not None:
        at.chosen, at.chosen_pages = place.chosen.pages_LKC.data_ptr(), place.chosen.pages_LKC.shape[-1]
    if place.votes is not None:
        at.votes, at.votes_pages = place.votes.data_ptr(), place.votes.shape[-1]
    if nodes:
        parents = (ctypes.c_int32 * nodes)(*place.tree.parents[:nodes])
        at.parents = ctypes.addressof(parents)
        pointed.append(parents)


def _name(at: structs.SegmentStruct, place: Rows, tokens: Sequence[int], pointed: list[object]) -> None:
    """Point a segment at the token ids of its rows, and of some text before them."""
    named = (ctypes.c_int64 * len(tokens))(*tokens)
    at.tokens = ctypes.addressof(named) + (len(tokens) - place.end) * ctypes.sizeof(ctypes.c_int64)
    pointed.append(named)


def _layer(joins: Sequence[SegmentFeatures]) -> int:
    layers = {given.features.join.layer for given in joins if given.features.join}
    if len(layers) > 1:
        raise ValueError(f"the rows of one forward join at one layer, not at {sorted(layers)}")
    return layers.pop() if layers else 0


def _joining(joins: Sequence[SegmentFeatures], order: Sequence[int]) -> ctypes.Array[structs.Joining]:
    found: list[structs.Joining] = []
    for given in joins:
        join = given.features.join
        assert join is not None, "only such rows join"
        rank, down, up = len(join.up_RH), join.down_RH.data_ptr(), join.up_RH.data_ptr()
        found += [structs.Joining(order[anchor], rank, down, up) for anchor in given.anchors]
    return (structs.Joining * len(found))(*found)


def set_places(model: structs.ModelStruct, config: DecoderConfig, pages: LayerPages) -> None:
    """Set where each layer's keys and values are cached, and where its experts begin in tables of adapters."""
    firsts = firsts_of_experts(config)
    for index, (place, recent) in enumerate(zip(pages.place, pages.recent, strict=True)):
        layer = model.layer[index]
        layer.place, layer.recent, layer.adapted = place, int(recent), firsts[index]
    for kind in (False, True):
        model.keys[kind] = structs.KeyHeads(*pages.key_heads(config, kind))
