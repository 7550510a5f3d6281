"""Adapters of low rank as torch operators: what they add to each product, for the runs of rows that have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.lora import TURNED, LowRankAdapter, in_order
from parlay.models.rope import interleave
from parlay.models.torch_ops.linear import MIN_ROWS, Linear, pack, padded, rows_independent

QKV, OUT, GATE_UP, DOWN = range(4)
"""The decoder's products of a layer."""
_PARTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)

Adapt = Callable[[int, int, Tensor, Tensor], None]
"""``(layer, product, x_NI, y_NO)``: add to a product's outputs what adapters add."""
AdaptLayer = Callable[[int, Tensor, Tensor], None]
"""The same for one layer."""


def adapt_nothing(layer: int, product: int, x_NI: Tensor, y_NO: Tensor) -> None:
    """For rows without adapters."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Matrices that add to the outputs from ``first`` on. ``together``: rows may be multiplied together."""

    down: Linear
    up: Linear
    first: int
    together: bool

    def add(self, x_KI: Tensor, y_KO: Tensor) -> None:
        """Add the product of some rows to their outputs, of which none depends on another's row."""
        part_KO = y_KO[:, self.first : self.first + self.up.out_features]
        if self.together:
            rows = len(x_KI)
            x_PI = torch.cat((x_KI, x_KI[:1].expand(padded(rows) - rows, -1)))
            part_KO += self.up(self.down(x_PI))[:rows]
            return
        for row_I, out_O in zip(x_KI, part_KO, strict=True):
            out_O += self.up(self.down(row_I.expand(MIN_ROWS, -1)))[0]


class _Run(NamedTuple):
    first: int
    end: int
    pairs: dict[tuple[int, int], list[_Pair]]


class TorchAdapters:
    """Adapters packed once each, in the decoder's dtype and on its device."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._held: WeakKeyDictionary[LowRankAdapter, dict[tuple[int, int], list[_Pair]]] = WeakKeyDictionary()
        self._independent: dict[tuple[int, int], bool] = {}
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._sizes = ([heads * config.head_dim for heads in sizes], [0], [config.intermediate_size] * 2, [0])

    def pack(self, adapter: LowRankAdapter) -> dict[tuple[int, int], list[_Pair]]:
        """Pack an adapter, unless it is: its pairs by layer and product. Any thread may call this."""
        pairs = self._held.get(adapter)
        if pairs is None:
            places = [(layer, product) for layer in range(self._config.num_layers) for product in range(len(_PARTS))]
            pairs = self._held[adapter] = {place: self._pairs(adapter, *place) for place in places}
        return pairs

    def adapt(self, rows: Sequence[LowRankAdapter | None]) -> Adapt:
        """Find what the adapters of these rows add; a row's is the same whatever rows are beside it."""
        if not any(rows):
            return adapt_nothing
        runs, first = list[_Run](), 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or rows[end] is not rows[first]:
                adapter = rows[first]
                runs += [_Run(first, end, self.pack(adapter))] if adapter is not None else []
                first = end

        def add(layer: int, product: int, x_NI: Tensor, y_NO: Tensor) -> None:
            for run in runs:
                for pair in run.pairs[layer, product]:
                    pair.add(x_NI[run.first : run.end], y_NO[run.first : run.end])

        return add

    def _pairs(self, adapter: LowRankAdapter, layer: int, product: int) -> list[_Pair]:
        found, first, rope, head_dim = [], 0, self._config.forms[layer].rope, self._config.head_dim
        for part, size in zip(_PARTS[product], self._sizes[product], strict=True):
            matrices = adapter.matrices.get(f"model.layers.{layer}.{part}.weight")
            if matrices is not None:
                up_OR = in_order(matrices.up_OR, part, rope, head_dim)
                up_OR = interleave(up_OR, head_dim) if part in TURNED else up_OR
                down, up = self._packed(matrices.down_RI), self._packed(up_OR)
                found.append(_Pair(down, up, first, self._is_independent(down) and self._is_independent(up)))
            first += size
        return found

    def _packed(self, matrix: Tensor) -> Linear:
        """``matrix`` ``[out, in]`` as a linear layer here."""
        return pack(matrix.to(self._device, self._dtype))

    def _is_independent(self, linear: Linear) -> bool:
        """Whether its rows come out the same in any company, judged once for each shape; elsewhere none does."""
        shape = (linear.in_features, linear.out_features)
        if shape not in self._independent:
            with torch.no_grad():
                self._independent[shape] = self._device.type != "cpu" or rows_independent(linear)
        return self._independent[shape]
