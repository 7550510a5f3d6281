"""One matrix that the compiled kernels multiply with: the input or output projection of a draft head."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.compiled import structs
from parlay.compiled.library import NotLoaded, load
from parlay.models.compiled.memory import WeightArena
from parlay.models.weights.formats import Format
from parlay.models.weights.fused import Operand, as_tensor, order_of_columns
from parlay.models.weights.quantize import fits_blocks, in_q8_0
from parlay.models.weights.stored import StoredTensor
from parlay.system import threads

_ROWS = 64  # fewer rows are not worth another thread


def _in_blocks(weight: Operand) -> tuple[int, Tensor]:
    """The number of a weight's format and its rows: blocks stay as they are; numbers are rounded to Q8_0, or to
    bfloat16 if they don't fill whole blocks."""
    if isinstance(weight, StoredTensor):
        return weight.format.number, weight.rows.contiguous()
    weight_OI = as_tensor(weight, torch.float32)
    if fits_blocks(weight_OI):
        return Format.Q8_0.number, in_q8_0(weight_OI).data.contiguous()
    return Format.BF16.number, weight_OI.to(torch.bfloat16).contiguous()


class Product:
    """Computes ``x W^T``, few rows on the caller's thread; ``W`` is kept in its file's blocks, in Q8_0, or in bfloat16.

    Without the compiled kernels torch computes it in float32.
    """

    def __init__(self, weight: Operand) -> None:
        self._weight_OI: Tensor | None = None
        try:
            self._core = load()
        except NotLoaded:
            self._weight_OI = as_tensor(weight, torch.float32)
            return
        weakref.finalize(self, self._core.rest).atexit = False  # a late thread of a call may still read the matrix
        out, inputs = weight.shape
        kind, rows = _in_blocks(weight)
        self._memory = WeightArena()
        panels = self._memory.take(-(-out // int(self._core.panel)) * int(self._core.panel_bytes(kind, inputs)))
        self._core.pack(kind, rows.data_ptr(), out, inputs, panels)
        self._linear = structs.Linear(panels=panels, inputs=inputs, outputs=out, kind=kind)
        columns = order_of_columns([weight])
        if columns is not None:
            self._order = columns.int()
            self._linear.order = self._order.data_ptr()

    @property
    def linear(self) -> structs.Linear:
        """The matrix for library calls that multiply with it; only with the compiled kernels."""
        return self._linear

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Multiply: ``[N, I]`` to ``[N, O]`` float32. Raises ValueError for rows of the wrong size."""
        x_NI = x_NI.float().contiguous()
        if self._weight_OI is not None:
            return F.linear(x_NI, self._weight_OI)
        check_inputs(self._linear, x_NI)
        found_NO = torch.empty(len(x_NI), self._linear.outputs)
        rows = max(_ROWS, -(-len(x_NI) // threads.count()))
        parts = zip(torch.split(x_NI, rows), torch.split(found_NO, rows), strict=True)
        jobs = [partial(self._multiply, x_KI, found_KO) for x_KI, found_KO in parts]
        if len(jobs) == 1:
            jobs[0]()
        else:
            deque(threads.run(jobs), maxlen=0)
        return found_NO

    def _multiply(self, x_KI: Tensor, found_KO: Tensor) -> None:
        if not self._core.multiply(ctypes.byref(self._linear), x_KI.data_ptr(), len(x_KI), found_KO.data_ptr()):
            raise MemoryError(f"no memory for a product of {len(x_KI)} rows")


def check_inputs(linear: structs.Linear, x_NI: Tensor) -> None:
    """Raises ValueError for rows that don't match the matrix."""
    if x_NI.dim() != 2 or x_NI.shape[1] != linear.inputs:
        raise ValueError(f"a product of {linear.inputs} inputs can't read rows of {tuple(x_NI.shape)} numbers")
