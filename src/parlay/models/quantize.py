"""Weights in eight bits: whole numbers from -127 to 127, times one step size for each output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 127


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A matrix ``[out, in]`` that is rounded to eight bits whenever somebody reads it, so that none is held twice."""

    source: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return tuple(self.source.shape)

    def quantized(self) -> tuple[Tensor, Tensor]:
        """int8 ``[out, in]`` and float32 steps ``[out]``; to nearest, none is clipped."""
        weight = self.source.float()
        steps = weight.abs().amax(1) / LARGEST
        safe = torch.where(steps > 0, steps, torch.ones_like(steps))
        return (weight / safe[:, None]).round().to(torch.int8), steps

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers that are left, for kernels that can't multiply int8."""
        numbers, steps = self.quantized()
        return (numbers.float() * steps[:, None]).to(dtype)
