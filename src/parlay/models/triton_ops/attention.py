"""Attention of all rows of a step over pages in place, by Triton kernels: one launch for all sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol

import torch
from torch import Tensor

from parlay.models.config import LayerForm
from parlay.models.forward import LayerPages
from parlay.models.rope import Rotations
from parlay.models.torch_ops.attention import Attend
from parlay.models.torch_ops.attention_form import AttentionKind, Heads, LayerRopes
from parlay.models.triton_ops.row_table import BLOCK, PlacedRows, RowNumbers, RowTable

_KEYS = {2: 64, 4: 32, 8: 8}
SPAN = 512
"""Keys per block, by bytes of a number, and keys per program; a row's last bits depend on both."""
_PARTS_BYTES = 64 << 20
"""Most bytes of partial results; the rows of a long prefill run in several launches."""


class Kernel(Protocol):
    """A Triton kernel, or its stand-in: indexing it by a grid returns the launcher."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


class PageKernels(Protocol):
    """The kernels of `parlay.models.triton_ops.kernels`; ``FACTORS`` maps torch's dtypes to Triton's."""

    @property
    def FACTORS(self) -> Mapping[torch.dtype, Any]: ...
    @property
    def store(self) -> Kernel: ...
    @property
    def attend(self) -> Kernel: ...
    @property
    def combine(self) -> Kernel: ...


@dataclass(frozen=True, slots=True)
class _Layout:
    """The shape of all products with these heads, as the kernels' constants."""

    heads: Heads
    dtype: torch.dtype

    @property
    def constants(self) -> dict[str, int | bool]:
        """The constants for which both attention kernels are compiled."""
        heads, wide = self.heads, self.dtype == torch.float64
        least = 1 if wide else 16  # the least size for matrix units
        return {
            "HEADS": heads.num_kv_heads,
            "G": heads.group,
            "GP": max(_power_of_two(heads.group), least),
            "D": heads.head_dim,
            "DP": max(_power_of_two(heads.head_dim), least),
            "KEYS": _KEYS[self.dtype.itemsize],
            "SPAN": SPAN,
            "WIDE": wide,
        }


class PagedAttention:
    """Attention of all kinds of layers. A row's result depends neither on other rows nor on where its keys are
    stored."""

    def __init__(
        self,
        kinds: Sequence[AttentionKind],
        forms: Sequence[LayerForm],
        ropes: LayerRopes,
        sinks: Sequence[Tensor | None],
        *,
        pages: LayerPages,
        kernels: PageKernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Each layer has its kind, its form, and ``sinks`` (``[heads]`` or None). Pages have numbers of ``dtype``."""
        multiplied = device.type != "cpu" and dtype in kernels.FACTORS  # the interpreter can't multiply bfloat16
        self._kernels, self._factors = kernels, kernels.FACTORS[dtype if multiplied else torch.float32]
        self._kinds, self._forms, self._ropes, self._pages, self._dtype = kinds, forms, ropes, pages, dtype
        self._layouts = {kind.heads: _Layout(kind.heads, dtype) for kind in kinds}
        self._sinks = [None if layer is None else layer.float().contiguous() for layer in sinks]

    def plan(self, placed: Sequence[PlacedRows], out: Mapping[Heads, Tensor]) -> Attend:
        """Plan the attention of these sequences' rows in every layer, into ``out`` ``[N, K * G * D]`` by heads."""
        rows, device = RowNumbers.of(placed), next(iter(out.values())).device
        table = RowTable.of(rows, device)
        return self.by_table(table, self._ropes.at(table.positions, rows.last), out)

    def by_table(self, table: RowTable, rotations: Sequence[Rotations], out: Mapping[Heads, Tensor]) -> Attend:
        """Plan the attention of the rows in a ``table``, with each layer's ``rotations`` of their positions.

        Its launches depend only on the table's shape and bound, not on its numbers.
        """

        def attend(layer: int, qkv_NAP: Tensor) -> None:
            kind, qkv_TAP, turns = self._kinds[layer], qkv_NAP[table.numbers], rotations[layer]
            pairs_TAP, more_TAP = qkv_TAP.tensor_split([kind.heads.num_heads], 1)
            queries = self._cached(pairs_TAP * turns.queries[:, 0])
            if layer not in kind.readers:
                new = more_TAP.reshape(len(qkv_TAP), 2, kind.heads.num_kv_heads, -1)
                self._store(layer, table, self._cached(new * turns.keys_values))
            target = out[kind.heads]
            if isinstance(table.numbers, slice):
                self._attend(layer, table, queries, target[table.numbers])
            else:
                own = target.new_empty(len(queries), target.shape[1])
                self._attend(layer, table, queries, own)
                target.index_copy_(0, table.numbers, own)

        return attend

    def _cached(self, turned: Tensor) -> Tensor:
        """Convert rotated pairs, ``turned`` ``[..., P]``, to the numbers ``[..., D]`` of pages and queries."""
        return torch.view_as_real(turned).flatten(-2).to(self._dtype)

    def _where(self, layer: int) -> tuple[int, int]:
        """A layer's kind of pages, and its index in them."""
        return int(self._pages.recent[layer]), self._pages.place[layer]

    def _store(self, layer: int, table: RowTable, new: Tensor) -> None:
        """Write keys and values ``new`` ``[T, 2, K, D]`` to the rows' slots."""
        layout = self._layouts[self._kinds[layer].heads].constants
        constants = {name: layout[name] for name in ("HEADS", "D", "DP")}
        grid = len(new), layout["HEADS"]
        self._kernels.store[grid](new, table.fields, table.lists, *self._where(layer), **constants, PAGE=BLOCK)

    def _attend(self, layer: int, table: RowTable, queries: Tensor, out: Tensor) -> None:
        """Attend with ``queries`` ``[T, A, D]``, into ``out`` ``[T, A * D]``."""
        form, layout = self._forms[layer], self._layouts[self._kinds[layer].heads].constants
        heads, width, spans = layout["HEADS"], layout["GP"], -(-table.bound // SPAN)
        sums = torch.float64 if layout["WIDE"] else torch.float32
        size = heads * spans * width
        most = max(1, _PARTS_BYTES // (size * layout["D"] * sums.itemsize))
        window, sinks = form.window or 0, self._sinks[layer]
        for first in range(0, len(queries), most):
            rows = slice(first, min(first + most, len(queries)))
            count, fields = rows.stop - first, table.fields[rows]
            mixed = queries.new_empty(count * size * layout["D"], dtype=sums)
            peaks, weights = queries.new_empty(2, count * size, dtype=sums).unbind()
            self._kernels.attend[count, heads, spans](
                *(queries[rows], mixed, peaks, weights, fields, table.lists, *self._where(layer), window, spans),
                form.score_cap,
                **layout,
                PAGE=BLOCK,
                ALIGNED=gcd(16, layout["D"] * self._dtype.itemsize),
                CAPPED=form.score_cap > 0,
                FACTORS=self._factors,
            )
            self._kernels.combine[count, heads](
                *(mixed, peaks, weights, fields, peaks if sinks is None else sinks, out[rows], window, spans),
                out.stride(0),
                **layout,
                SINKS=sinks is not None,
            )


def _power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
