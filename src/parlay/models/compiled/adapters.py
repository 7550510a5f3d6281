"""Adapters of low rank as the library reads them: packed once each, and pointed at by the rows that have them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.compiled import structs
from parlay.models.config import DecoderConfig
from parlay.models.lora import LowRankAdapter, in_order
from parlay.models.lora_layout import Place, place_of


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """``table`` has all products of layers, then of experts, and points into ``memory``.

    ``rank`` is the most of all, in whole vectors.
    """

    table: ctypes.Array[structs.LowRank]
    memory: list[Tensor]
    rank: int


_OUT = "down_proj"
_ADDED = ("self_attn.o_proj", _OUT)
"""Ends of the names of products whose outputs are added to the hidden state."""


def firsts_of_experts(config: DecoderConfig) -> list[int]:
    """Where the experts of each layer begin in an adapter's table, behind the products of all layers, and its end."""
    counts = [0 if form.experts is None else form.experts.count + (form.experts.shared > 0) for form in config.forms]
    counts = [config.num_layers * structs.LAYER_PRODUCTS, *(count * structs.EXPERT_PRODUCTS for count in counts)]
    return list(accumulate(counts))


def _leading_out(name: str) -> str:
    """The name of the matrix that leads out of the feed-forward of which a matrix is part."""
    return f"{name.removesuffix('.weight').rpartition('.')[0]}.{_OUT}.weight"


class PackedAdapters:
    """Packs adapters for ``core`` in ``dtype``, float32 or bfloat16. An adapter that nobody has any more is dropped."""

    def __init__(
        self, core: structs.Core, config: DecoderConfig, dtype: torch.dtype, orders: Mapping[str, Tensor]
    ) -> None:
        """``orders`` are those of the inputs of matrices that have one of their own."""
        self._orders = orders
        self._firsts = firsts_of_experts(config)
        runs = [form.experts.chosen + (form.experts.shared > 0) for form in config.forms if form.experts]
        self._runs = max(runs, default=1)
        self._panel, self._config, self._dtype = int(core.panel), config, dtype
        self._each = 2 if dtype == torch.bfloat16 else 1  # numbers of a word
        self._held: WeakKeyDictionary[LowRankAdapter, _Packed] = WeakKeyDictionary()

    def pack(self, adapter: LowRankAdapter) -> _Packed:
        """Pack an adapter, unless it is. Any thread may call this."""
        packed = self._held.get(adapter)
        if packed is None:
            packed = self._held[adapter] = self._packed(adapter)
        return packed

    def fill(self, batch: structs.Batch, rows: Sequence[LowRankAdapter | None], pointed: list[object]) -> int:
        """Point the batch at the adapters of its rows; what it points to joins ``pointed``.

        Returns how many bytes of room `structs.Batch.lowered` needs.
        """
        packed = {adapter: self.pack(adapter) for adapter in dict.fromkeys(rows) if adapter is not None}
        addresses = {adapter: ctypes.addressof(each.table) for adapter, each in packed.items()}
        table = (ctypes.c_void_p * len(rows))(*(addresses[row] if row is not None else None for row in rows))
        batch.adapters = ctypes.addressof(table)
        batch.most_rank, batch.brains = max(each.rank for each in packed.values()), int(self._each > 1)
        pointed += [table, packed]
        return len(rows) * self._runs * 3 * int(batch.most_rank) * 4

    def _packed(self, adapter: LowRankAdapter) -> _Packed:
        memory: list[Tensor] = []
        table = (structs.LowRank * self._firsts[-1])()
        for name, pair in adapter.matrices.items():
            place = place_of(name, self._config)
            assert place is not None, "it was read for rows"
            layer, product = place.layer, place.product
            form, order = self._config.forms[layer], self._orders.get(_leading_out(name))
            down_RI, up_OR = pair.down_RI, in_order(pair.up_OR, product, form.rope, self._config.heads_of(form).size)
            if order is not None and product.endswith(_OUT):
                down_RI = down_RI[:, order]
            elif order is not None:
                up_OR = up_OR[order]
            if product.endswith(_ADDED):
                up_OR = up_OR * form.residual_scale
            down, up = self._down(down_RI), self._up(up_OR)
            memory += [down, up]
            table[self._number(place)] = structs.LowRank(len(pair.down_RI), down.data_ptr(), up.data_ptr())
        most = max((len(pair.down_RI) for pair in adapter.matrices.values()), default=1)
        return _Packed(table, memory, most + -most % (self._panel // 2))

    def _number(self, place: Place) -> int:
        """Where a product is in the tables of adapters."""
        if place.expert is None:
            return place.layer * structs.LAYER_PRODUCTS + place.number
        return self._firsts[place.layer] + place.expert * structs.EXPERT_PRODUCTS + place.number

    def _down(self, down_RI: Tensor) -> Tensor:
        """By vectors of ranks, then words of inputs: ``[ranks / LANES, words, LANES]``."""
        lanes = self._panel // 2
        padded = F.pad(down_RI.to(self._dtype), (0, 0, 0, -len(down_RI) % lanes))
        return padded.view(-1, lanes, down_RI.shape[1] // self._each, self._each).transpose(1, 2).contiguous()

    def _up(self, up_OR: Tensor) -> Tensor:
        """By panels of outputs, then words of ranks: ``[O / panel, words, panel]``."""
        outputs, rank = up_OR.shape
        padded = F.pad(up_OR.to(self._dtype), (0, -rank % self._each, 0, -outputs % self._panel))
        return padded.view(-1, self._panel, -(-rank // self._each), self._each).transpose(1, 2).contiguous()
