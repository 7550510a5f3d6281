"""LoRA adapters as torch operators: they add to products of the rows that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.lora import TURNED, LowRankAdapter, in_order
from parlay.models.lora_layout import LowRank, Place, place_of
from parlay.models.rope import interleave
from parlay.models.torch_ops.linear import MIN_ROWS, Linear, pack, padded, rows_independent

QKV, OUT, GATE_UP, DOWN = range(4)
"""A layer's products; the last two exist in experts, too."""
_PRODUCT = {
    "q_proj": (QKV, 0),
    "k_proj": (QKV, 1),
    "v_proj": (QKV, 2),
    "o_proj": (OUT, 0),
    "gate_proj": (GATE_UP, 0),
    "up_proj": (GATE_UP, 1),
    "down_proj": (DOWN, 0),
}
"""The product that a matrix adds to and its part of that product, by the last part of its name."""

ProductOf = tuple[int, int | None, int]
"""Layer, expert (or None), and product."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Matrices that add to a product's outputs from ``first`` on. ``together``: whether rows may be multiplied
    together."""

    down: Linear
    up: Linear
    first: int
    together: bool

    def add(self, x_KI: Tensor, y_KO: Tensor) -> None:
        """Add the product of some rows to their outputs; no row's result depends on other rows."""
        part_KO = y_KO[:, self.first : self.first + self.up.out_features]
        if self.together:
            rows = len(x_KI)
            x_PI = torch.cat((x_KI, x_KI[:1].expand(padded(rows) - rows, -1)))
            part_KO += self.up(self.down(x_PI))[:rows]
            return
        for row_I, out_O in zip(x_KI, part_KO, strict=True):
            out_O += self.up(self.down(row_I.expand(MIN_ROWS, -1)))[0]


Pairs = Mapping[ProductOf, Sequence[_Pair]]
"""An adapter's matrices by the products that they add to."""


class _Run(NamedTuple):
    """Rows ``first`` to ``end``, which use the same adapter."""

    first: int
    end: int
    pairs: Pairs


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """The adapters of some rows; later rows have none."""

    rows: Sequence[Pairs | None] = ()
    runs: Sequence[_Run] = ()

    @classmethod
    def of(cls, rows: Sequence[Pairs | None]) -> RowAdapters:
        """Group rows by adapter; None means no adapter."""
        runs, first = list[_Run](), 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or rows[end] is not rows[first]:
                pairs = rows[first]
                runs += [] if pairs is None else [_Run(first, end, pairs)]
                first = end
        return cls(rows, runs) if runs else NO_ADAPTERS

    def add(self, product: ProductOf, x_NI: Tensor, y_NO: Tensor) -> None:
        """Add the adapters' products to a product's outputs, run by run."""
        for first, end, pairs in self.runs:
            for pair in pairs.get(product, ()):
                pair.add(x_NI[first:end], y_NO[first:end])

    def chosen(self, rows: Sequence[int]) -> RowAdapters:
        """The adapters of the rows with these indices, in this order."""
        if not self.runs:
            return self
        return RowAdapters.of([self.rows[row] if row < len(self.rows) else None for row in rows])


NO_ADAPTERS = RowAdapters()


class TorchAdapters:
    """Adapters in the decoder's dtype and on its device, packed once each."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._packed_by: WeakKeyDictionary[LowRankAdapter, Pairs] = WeakKeyDictionary()
        self._independent: dict[tuple[int, int], bool] = {}

    def pack(self, adapter: LowRankAdapter) -> Pairs:
        """Pack an adapter, unless it is packed; returns its matrices by product. Any thread may call this."""
        pairs = self._packed_by.get(adapter)
        if pairs is None:
            found: dict[ProductOf, list[_Pair]] = {}
            for name, matrices in adapter.matrices.items():
                place = place_of(name, self._config)
                assert place is not None, "it was read for rows"
                product, part = _PRODUCT[place.product.rpartition(".")[2]]
                pair = self._pair(place, matrices, self._first(place, part))
                found.setdefault((place.layer, place.expert, product), []).append(pair)
            pairs = self._packed_by[adapter] = found
        return pairs

    def adapt(self, rows: Sequence[LowRankAdapter | None]) -> RowAdapters:
        """The adapters of these rows; a row's result does not depend on other rows."""
        return RowAdapters.of([None if row is None else self.pack(row) for row in rows])

    def _first(self, place: Place, part: int) -> int:
        """The first output of part number ``part`` in a fused product."""
        config, form = self._config, self._config.forms[place.layer]
        if place.product.startswith("self_attn."):
            heads = config.heads_of(form)
            return (0, config.num_heads, config.num_heads + heads.heads)[part] * heads.size
        experts = form.experts
        if place.expert is None or experts is None:
            return part * config.mlp_size_of(form)
        return part * (experts.size if place.expert < experts.count else experts.shared)

    def _pair(self, place: Place, matrices: LowRank, first: int) -> _Pair:
        form = self._config.forms[place.layer]
        rope, head_dim = form.rope, self._config.heads_of(form).size
        up_OR = in_order(matrices.up_OR, place.product, rope, head_dim)
        up_OR = interleave(up_OR, head_dim) if place.product in TURNED else up_OR
        down, up = self._packed(matrices.down_RI), self._packed(up_OR)
        return _Pair(down, up, first, self._is_independent(down) and self._is_independent(up))

    def _packed(self, matrix: Tensor) -> Linear:
        """``matrix`` ``[out, in]`` as a linear layer."""
        return pack(matrix.to(self._device, self._dtype))

    def _is_independent(self, linear: Linear) -> bool:
        """Whether rows come out the same in any batch, tested once per shape on a CPU and assumed elsewhere."""
        shape = (linear.in_features, linear.out_features)
        if shape not in self._independent:
            with torch.no_grad():
                self._independent[shape] = self._device.type != "cpu" or rows_independent(linear)
        return self._independent[shape]
