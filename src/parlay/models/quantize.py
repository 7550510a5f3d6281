"""Weights in eight bits: whole numbers from -127 to 127, times one step size for each output."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight [out, in]`` as int8 of the same shape and float32 steps ``[out]``; to nearest, none is clipped."""
    steps = weight.float().abs().amax(1) / LARGEST
    safe = torch.where(steps > 0, steps, torch.ones_like(steps))
    return (weight.float() / safe[:, None]).round().to(torch.int8), steps


def rounded(weight: Tensor) -> Tensor:
    """What ``weight`` is after `quantized`, in its own dtype: for kernels that can't multiply int8."""
    numbers, steps = quantized(weight)
    return (numbers.float() * steps[:, None]).to(weight.dtype)
