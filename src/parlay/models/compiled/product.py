"""One matrix alone on the compiled kernels: for the few rows of a draft head torch takes several times as long."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.compiled import structs
from parlay.compiled.library import NotLoaded, load
from parlay.models.compiled.weights import WeightArena
from parlay.models.weights.quantize import fits_blocks, in_q8_0
from parlay.models.weights.stored import Format


class Product:
    """``x W^T`` on the caller's thread; ``W`` in blocks of eight bits, or in bfloat16 where rows are no whole blocks.

    Without the compiled kernels in float32, by torch.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI: Tensor | None = None
        try:
            self._core = load()
        except NotLoaded:
            self._weight_OI = weight_OI.float()
            return
        out, inputs = weight_OI.shape
        blocks = in_q8_0(weight_OI) if fits_blocks(weight_OI) else None
        kind = (Format.BF16 if blocks is None else Format.Q8_0).number
        rows = weight_OI.to(torch.bfloat16).contiguous() if blocks is None else blocks.data.contiguous()
        self._memory = WeightArena()
        panels = self._memory.take(-(-out // int(self._core.panel)) * int(self._core.panel_bytes(kind, inputs)))
        self._core.pack(kind, rows.data_ptr(), out, inputs, panels.data_ptr())
        self._linear = structs.Linear(panels=panels.data_ptr(), inputs=inputs, outputs=out, kind=kind)

    @property
    def linear(self) -> structs.Linear:
        """As the library reads it, for calls that multiply with it; only where that is there."""
        return self._linear

    def __call__(self, x_NI: Tensor) -> Tensor:
        """``[N, O]`` float32."""
        x_NI = x_NI.float().contiguous()
        if self._weight_OI is not None:
            return F.linear(x_NI, self._weight_OI)
        found_NO = torch.empty(len(x_NI), self._linear.outputs)
        self._core.multiply(ctypes.byref(self._linear), x_NI.data_ptr(), len(x_NI), found_NO.data_ptr())
        return found_NO
