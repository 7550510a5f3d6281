"""Matrices in the layout that the compiled products read, and the jobs that pack them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.compiled import structs
from parlay.models.compiled.memory import Arena
from parlay.models.compiled.streaming import PackedUnit
from parlay.models.gguf.packing_ahead import PackingAhead
from parlay.models.weights.formats import DamagedWeights, Format
from parlay.models.weights.fused import Operand, as_tensor, order_of_columns
from parlay.models.weights.grids import packable
from parlay.models.weights.quantize import Int8Weight
from parlay.models.weights.stored import StoredTensor

S = TypeVar("S", structs.LayerStruct, structs.Expert)
_INT8 = 24
"""The number of `Int8Weight`'s format: that of int8 in ggml."""
_PLAIN = {torch.float32: Format.F32.number, torch.bfloat16: Format.BF16.number}
_PART = 1 << 22
"""Bytes of a file's blocks that one job packs; at least one panel."""


class Matrices:
    """Lays matrices out in an arena's memory, and collects the jobs that pack them. It owns that memory."""

    def __init__(self, core: structs.Core, dtype: torch.dtype, arena: Arena, *, ahead: bool) -> None:
        """With ``ahead``, matrices that were packed before torch was imported are used where they lie."""
        self._core, self._dtype, self._panel, self._may_be_ahead = core, dtype, int(core.panel), ahead
        self._memory, self.kept = arena, list[Tensor]()
        self.jobs: list[Callable[[], object]] = []
        self.ahead: PackingAhead | None = None
        self.alone = 0  # how many matrices became numbers: their column order differs from their neighbours'
        self._linears: dict[int, tuple[Operand, structs.Linear]] = {}

    def forget_uses(self) -> None:
        """Drop the checkpoint's weights after all are packed."""
        self.jobs, self._linears = [], {}

    def laid_in(self, arena: Arena, lay_out: Callable[[], S]) -> PackedUnit[S]:
        """Lay a layer or an expert out in another arena, and return it with the jobs that pack it."""
        before = self._memory, self.jobs, self._linears, self.alone
        self._memory, self.jobs, self._linears = arena, [], {}
        found = PackedUnit(lay_out(), self.jobs)
        self._memory, self.jobs, self._linears, self.alone = before
        return found

    def side_by_side(self, weights: Sequence[Operand]) -> Sequence[Operand]:
        """Weights that read the same rows: if their column orders differ, those in permuted blocks become plain
        numbers."""
        if order_of_columns(weights) is not None:
            return weights
        return [self._in_columns(weight) for weight in weights]

    def _in_columns(self, weight: Operand) -> Operand:
        """Convert a weight to plain numbers if its blocks' columns are permuted."""
        if order_of_columns([weight]) is None:
            return weight
        self.alone += 1
        return as_tensor(weight, self._dtype)

    def rows_of(self, weight: Operand) -> structs.Linear:
        """Lay out an embedding, of which single rows are read. Plain numbers lie in rows; blocks are packed as for
        products.

        Rows are copied, as truncating a mapped file would kill the process that reads it.
        """
        embedding = self._in_columns(weight)
        if isinstance(embedding, StoredTensor) and embedding.format.plain is None:
            return self.linear(embedding)
        kind = self._kind(embedding)
        out, inputs = embedding.shape
        rows = self._rows(embedding, kind).clone()
        return structs.Linear(panels=self.hold(rows), inputs=inputs, outputs=out, kind=kind)

    def linear(self, weight: Operand, bias_O: Tensor | None = None, scale: float = 1.0) -> structs.Linear:
        """Lay out ``weight`` ``[O, I]``; outputs are multiplied by ``scale``. A job packs it; a weight that is used
        twice is packed once."""
        bare = bias_O is None and scale == 1
        if bare and id(weight) in self._linears:
            return self._linears[id(weight)][1]
        linear = self._packed_linear(weight, bias_O, scale)
        if bare:
            self._linears[id(weight)] = weight, linear  # keeps the weight alive, so that its id stays unique
        return linear

    def _packed_linear(self, weight: Operand, bias_O: Tensor | None, scale: float) -> structs.Linear:
        (out, inputs), kind = weight.shape, self._kind(weight)
        linear = structs.Linear(inputs=inputs, outputs=out, kind=kind, order=self._hold_order(weight))
        if bias_O is not None:
            linear.bias = self._padded(bias_O * scale).data_ptr()
        if scale != 1:
            linear.scale = self._padded(torch.full((out,), scale)).data_ptr()
        if self._is_packed_ahead(linear, weight):
            return linear
        panels = -(-out // self._panel)
        linear.panels = self._memory.take(panels * int(self._core.panel_bytes(kind, inputs)))
        if isinstance(weight, Int8Weight):
            linear.scale = self._memory.take(panels * self._panel * torch.float32.itemsize)
            self.jobs.append(lambda: self._pack(linear, _rounded(weight, linear.scale, scale)))
        elif isinstance(weight, StoredTensor):
            self._pack_stored(linear, weight)
        else:
            self.jobs.append(lambda: self._pack(linear, weight.to(self._dtype)))
        return linear

    def _is_packed_ahead(self, linear: structs.Linear, weight: Operand) -> bool:
        """Whether this matrix was packed ahead in the wanted form; ``linear`` then points at its panels."""
        if not isinstance(weight, StoredTensor) or weight.ahead is None or weight.order is not None:
            return False
        if not self._may_be_ahead:
            return False
        panels = weight.ahead.panels(int(weight.data.storage_offset()))
        if panels is None or weight.ahead.core.name != self._core.name or weight.format.number != linear.kind:
            return False
        linear.panels, self.ahead = panels, weight.ahead
        return True

    def _kind(self, weight: Operand) -> int:
        """The format to pack in: the file's, except that bfloat16 becomes ``dtype`` when computing in another one."""
        if isinstance(weight, Int8Weight):
            return _INT8
        if isinstance(weight, StoredTensor) and (weight.format is not Format.BF16 or self._dtype == torch.bfloat16):
            return weight.format.number
        return _PLAIN[self._dtype]

    def _rows(self, weight: Operand, kind: int) -> Tensor:
        if isinstance(weight, StoredTensor) and weight.format.number == kind:
            return weight.rows
        return as_tensor(weight, self._dtype)

    def _pack_stored(self, linear: structs.Linear, weight: StoredTensor) -> None:
        """Pack in parts, so that little of the file is in memory beside the packed matrix."""
        row_bytes = weight.format.row_bytes(linear.inputs)
        first = 0
        for part in weight.parts(max(_PART // (row_bytes * self._panel), 1) * self._panel):
            self.jobs.append(partial(self._pack_part, linear, part, first))
            first += part.shape[0]

    def _pack_part(self, linear: structs.Linear, part: StoredTensor, first: int) -> None:
        if part.format.number != linear.kind:
            with part.reading():
                self._pack(linear, self._rows(part, linear.kind), first)
        elif not self._pack(linear, packable(part), first):
            raise DamagedWeights(part.origin)
        else:
            part.give_back()

    def _pack(self, linear: structs.Linear, rows: Tensor, first: int = 0) -> bool:
        """Pack ``rows`` ``[O, I]`` or ``[O, bytes]``; see `pack_rows`."""
        return pack_rows(self._core, linear, rows, first)

    def _padded(self, numbers_O: Tensor) -> Tensor:
        """Pad with zeros to a whole panel, in float32."""
        padded = F.pad(numbers_O.float(), (0, -len(numbers_O) % self._panel)).contiguous()
        self.kept.append(padded)
        return padded

    def hold(self, tensor: Tensor) -> int:
        """Keep ``tensor``, of any shape, alive as long as the weights, and return its address."""
        self.kept.append(tensor.contiguous())
        return self.kept[-1].data_ptr()

    def _hold_order(self, weight: Operand) -> int | None:
        """The address of the weight's column order, int32; None if its columns are in order."""
        order = order_of_columns([weight])
        return None if order is None else self.hold(order.int())

    def hold_any(self, tensor: Tensor | None) -> int | None:
        """The address of ``tensor``, of any shape, or None; see `hold`."""
        return None if tensor is None else self.hold(tensor)


def pack_rows(core: structs.Core, linear: structs.Linear, rows: Tensor, first: int = 0) -> bool:
    """Pack ``rows`` ``[O, I]`` (numbers) or ``[O, bytes]`` (blocks) as the outputs from ``first`` on, which begins a
    panel.

    Returns whether all numbers, or the blocks' scales, are finite.
    """
    rows = rows.contiguous()
    panels = linear.panels + first // int(core.panel) * core.panel_bytes(linear.kind, linear.inputs)
    return bool(core.pack(linear.kind, rows.data_ptr(), len(rows), linear.inputs, panels))


def _rounded(weight: Int8Weight, steps_O: int, scale: float) -> Tensor:
    """The weight's integers ``[O, I]``; their step sizes, times ``scale``, are written to the address ``steps_O``."""
    numbers, found = weight.quantized()
    steps = (found * scale).float().contiguous()
    ctypes.memmove(steps_O, steps.data_ptr(), steps.nbytes)
    return numbers
