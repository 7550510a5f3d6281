"""LoRA adapters as the library reads them: each is packed once, and the rows that use it point at it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.cache.pages import zeros
from parlay.compiled import structs
from parlay.models.config import DecoderConfig
from parlay.models.lora import LowRankAdapter, in_order
from parlay.models.lora_layout import LowRank, Place, place_of
from parlay.models.weights.formats import Format
from parlay.models.weights.quantize import fits_blocks, in_q8_0


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """The products in ``table`` are those of layers, then of experts; they point into ``memory``.

    ``rank`` is the largest rank, rounded up to whole vectors. ``codes``: whether all matrices are in eight bits.
    """

    table: ctypes.Array[structs.LowRank]
    memory: Tensor
    rank: int
    codes: bool


class _Pair(NamedTuple):
    """The two LoRA matrices of one product, A and B, in the library's layout; ``coded``: whether they are in eight
    bits."""

    place: Place
    rank: int
    coded: bool
    halves: tuple[Tensor, Tensor]


_LINE = 64
"""Bytes of a cache line."""
_OUT = "down_proj"
_LAYER = ("query", "key", "value", "out", "gate", "up", "down")
"""Names of a layer's products; those from the fifth on are an expert's, too."""
_PLAIN = (Format.F32.number, Format.F16.number, Format.BF16.number)
_RANKS = 16
"""Ranks of an eight-bit B matrix that share a scale."""
_LARGEST, _ROOM = 127, 10
"""The largest code, and the power of two to which A is scaled, as half precision holds its step sizes well there."""
_ADDED = ("self_attn.o_proj", _OUT)
"""Last parts of the names of products that are added to the hidden state."""


def firsts_of_experts(config: DecoderConfig) -> list[int]:
    """The index in an adapter's table at which each layer's experts begin, after the products of all layers; the last
    is the end."""
    counts = [0 if form.experts is None else form.experts.count + (form.experts.shared > 0) for form in config.forms]
    counts = [config.num_layers * structs.LAYER_PRODUCTS, *(count * structs.EXPERT_PRODUCTS for count in counts)]
    return list(accumulate(counts))


def _read(place: Place) -> tuple[int, int, int]:
    """The order in which a forward reads a product: layer, expert, and the first matrix of its group."""
    group = place.number // 2 if place.expert is not None else (0, 0, 0, 1, 2, 2, 3)[place.number]
    return place.layer, -1 if place.expert is None else place.expert, group


def _leading_out(name: str) -> str:
    """The name of the down projection in the feed-forward that a matrix is part of."""
    return f"{name.removesuffix('.weight').rpartition('.')[0]}.{_OUT}.weight"


class PackedAdapters:
    """Packs adapters for ``core`` in ``dtype``, float32 or bfloat16. A packed adapter lives as long as its
    `LowRankAdapter`."""

    def __init__(
        self,
        core: structs.Core,
        config: DecoderConfig,
        dtype: torch.dtype,
        model: structs.ModelStruct,
        orders: Mapping[str, Tensor],
    ) -> None:
        """``orders`` are the column orders of those matrices of ``model`` whose inputs are permuted."""
        self._core, self._model, self._orders = core, model, orders
        self._firsts = firsts_of_experts(config)
        runs = [form.experts.chosen + (form.experts.shared > 0) for form in config.forms if form.experts]
        self._runs = max(runs, default=1)
        self._panel, self._config, self._dtype = int(core.panel), config, dtype
        self._each = 2 if dtype == torch.bfloat16 else 1  # numbers in a word
        self._packed_by: WeakKeyDictionary[LowRankAdapter, _Packed] = WeakKeyDictionary()

    def pack(self, adapter: LowRankAdapter) -> _Packed:
        """Pack an adapter, or return it if it is packed already. Any thread may call this."""
        packed = self._packed_by.get(adapter)
        if packed is None:
            packed = self._packed_by[adapter] = self._packed(adapter)
        return packed

    def fill(self, batch: structs.Batch, rows: Sequence[LowRankAdapter | None], pointed: list[object]) -> int:
        """Point the batch at the adapters of its rows; the memory that it points to is added to ``pointed``.

        Returns how many bytes `structs.Batch.lowered` needs.
        """
        packed = {adapter: self.pack(adapter) for adapter in dict.fromkeys(rows) if adapter is not None}
        addresses = {adapter: ctypes.addressof(each.table) for adapter, each in packed.items()}
        table = (ctypes.c_void_p * len(rows))(*(addresses[row] if row is not None else None for row in rows))
        batch.adapters = ctypes.addressof(table)
        batch.most_rank, batch.bfloats = max(each.rank for each in packed.values()), int(self._each > 1)
        batch.codes = int(all(each.codes for each in packed.values()))
        pointed += [table, packed]
        return len(rows) * self._runs * 3 * int(batch.most_rank) * 4

    def _packed(self, adapter: LowRankAdapter) -> _Packed:
        """Lay the matrices one behind the other in the order in which a forward reads them, so that prefetching
        works."""
        table, pairs = (structs.LowRank * self._firsts[-1])(), list[_Pair]()
        for name, matrices in adapter.matrices.items():
            place = place_of(name, self._config)
            assert place is not None, "it was read for rows"
            pairs.append(self._pair(name, place, matrices))
        ordered = sorted(
            (*_read(pair.place), half, pair.place.number, number)
            for number, pair in enumerate(pairs)
            for half in (0, 1)
        )
        sizes = [_LINE * -(-pairs[number].halves[half].nbytes // _LINE) for *_, half, _, number in ordered]
        memory, begin = zeros((sum(sizes),), torch.uint8, torch.device("cpu")), 0
        for (*_, half, _, number), size in zip(ordered, sizes, strict=True):
            part, pair = pairs[number].halves[half].flatten().view(torch.uint8), pairs[number]
            memory[begin : begin + len(part)] = part
            at = table[self._number(pair.place)]
            at.rank, at.codes = pair.rank, int(pair.coded)
            setattr(at, ("down", "up")[half], memory.data_ptr() + begin)
            begin += size
        most = max((pair.rank for pair in pairs), default=1)
        return _Packed(table, memory, most + -most % _RANKS, all(pair.coded for pair in pairs))

    def _pair(self, name: str, place: Place, matrices: LowRank) -> _Pair:
        form, order = self._config.forms[place.layer], self._orders.get(_leading_out(name))
        head_dim = self._config.heads_of(form).size
        down_RI, up_OR = matrices.down_RI, in_order(matrices.up_OR, place.product, form.rope, head_dim)
        if order is not None and place.product.endswith(_OUT):
            down_RI = down_RI[:, order]
        elif order is not None:
            up_OR = up_OR[order]
        if place.product.endswith(_ADDED):
            up_OR = up_OR * form.residual_scale
        linear = self._linear(place)
        coded = self._each > 1 and linear.kind not in _PLAIN and fits_blocks(down_RI)
        if coded and linear.order:
            own = name.replace("v_proj", "k_proj") if form.keys_as_values else name  # keys and values are one matrix
            down_RI = down_RI[:, self._orders[own]]
        halves = self._in_codes(down_RI, up_OR) if coded else (self._down(down_RI), self._up(up_OR))
        return _Pair(place, len(down_RI), coded, halves)

    def _linear(self, place: Place) -> structs.Linear:
        """The packed matrix that an adapter's product is added to."""
        layer = self._model.layer[place.layer]
        owner, names = (layer, _LAYER) if place.expert is None else (layer.expert[place.expert], _LAYER[4:])
        return getattr(owner, names[place.number])  # type: ignore[no-any-return]

    def _number(self, place: Place) -> int:
        """The product's index in the tables of adapters."""
        if place.expert is None:
            return place.layer * structs.LAYER_PRODUCTS + place.number
        return self._firsts[place.layer] + place.expert * structs.EXPERT_PRODUCTS + place.number

    def _down(self, down_RI: Tensor) -> Tensor:
        """Lay A out by vectors of ranks, then words of inputs: ``[ranks / LANES, words, LANES]``."""
        lanes = self._panel // 2
        padded = F.pad(down_RI.to(self._dtype), (0, 0, 0, -len(down_RI) % lanes))
        return padded.view(-1, lanes, down_RI.shape[1] // self._each, self._each).transpose(1, 2).contiguous()

    def _up(self, up_OR: Tensor) -> Tensor:
        """Lay B out by panels of outputs, then words of ranks: ``[O / panel, words, panel]``."""
        outputs, rank = up_OR.shape
        padded = F.pad(up_OR.to(self._dtype), (0, -rank % self._each, 0, -outputs % self._panel))
        return padded.view(-1, self._panel, -(-rank // self._each), self._each).transpose(1, 2).contiguous()

    def _in_codes(self, down_RI: Tensor, up_OR: Tensor) -> tuple[Tensor, Tensor]:
        """A and B in eight bits: A in strips like Q8_0, ``[ranks / LANES, bytes]``, B in panels of 16 ranks with their
        scales.

        The codes of B are ``[O / panel, ranks / 16, strips, 4, LANES, 4]``; each group of 16 ranks is followed by its
        scales.
        """
        power = _ROOM - int(torch.frexp(down_RI.abs().max()).exponent)
        down_RI, up_OR = torch.ldexp(down_RI, torch.tensor(power)), torch.ldexp(up_OR, torch.tensor(-power))
        rank, inputs = down_RI.shape
        rows, lanes = in_q8_0(down_RI).data.contiguous(), self._panel // 2
        bytes_of_panel = int(self._core.panel_bytes(Format.Q8_0.number, inputs))
        strips = torch.empty(-(-rank // self._panel) * bytes_of_panel, dtype=torch.uint8)
        self._core.pack(Format.Q8_0.number, rows.data_ptr(), rank, inputs, strips.data_ptr())
        padded = F.pad(up_OR, (0, -rank % _RANKS, 0, -len(up_OR) % self._panel))
        groups = padded.view(-1, 2, lanes, padded.shape[1] // _RANKS, _RANKS)
        steps = groups.abs().amax(-1, keepdim=True) / _LARGEST
        codes = (groups / torch.where(steps > 0, steps, 1)).round().to(torch.int16) + 128
        words = codes.to(torch.uint8).view(*codes.shape[:-1], 4, 4).permute(0, 3, 1, 4, 2, 5).flatten(2)
        scales = steps.squeeze(-1).permute(0, 3, 1, 2).contiguous().view(torch.uint8).flatten(2)
        return strips[: -(-rank // lanes) * bytes_of_panel // 2].clone(), torch.cat((words, scales), -1).contiguous()
