"""Quantizes weights: integers with one step size per output, or blocks of GGUF formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.models.weights.formats import Format
from parlay.models.weights.stored import StoredTensor

LARGEST = 127
_HIGHEST = 15  # the largest code of Q4_1
_HALF = 16  # offset of Q5_0's codes


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A matrix ``[out, in]`` that is quantized to int8 each time it is read, so that it is not stored twice."""

    source: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return tuple(self.source.shape)

    def quantized(self) -> tuple[Tensor, Tensor]:
        """int8 ``[out, in]`` and float32 step sizes ``[out]``, rounded to nearest without clipping."""
        weight = self.source.float()
        steps = weight.abs().amax(1) / LARGEST
        safe = torch.where(steps > 0, steps, torch.ones_like(steps))
        return (weight / safe[:, None]).round().to(torch.int8), steps

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The dequantized numbers, for kernels that can't multiply int8."""
        numbers, steps = self.quantized()
        return (numbers.float() * steps[:, None]).to(dtype)


def fits_blocks(weight: Tensor) -> bool:
    """Whether the rows of ``weight`` ``[..., n]`` are whole blocks of the formats below."""
    return weight.shape[-1] % Format.Q8_0.block == 0


def in_q8_0(weight_OI: Tensor) -> StoredTensor:
    """Quantize a matrix to Q8_0. Raises ValueError unless its rows are whole blocks."""
    blocks_NK = weight_OI.float().reshape(-1, Format.Q8_0.block)
    scale_N1 = (blocks_NK.abs().amax(1, keepdim=True) / LARGEST).to(torch.float16)
    steps_N1 = torch.where(scale_N1 == 0, torch.ones_like(scale_N1), scale_N1).float()
    codes_NK = (blocks_NK / steps_N1).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    packed_NB = torch.cat((scale_N1.view(torch.uint8), codes_NK.view(torch.uint8)), 1)
    return StoredTensor(Format.Q8_0, tuple(weight_OI.shape), packed_NB.view(len(weight_OI), -1))


def in_q5_0(weight_OI: Tensor) -> StoredTensor:
    """Quantize a matrix to Q5_0. Raises ValueError unless its rows are whole blocks.

    A block has a scale, the fifth bits of its 32 codes, then their low nibbles, two per byte. The number of largest
    magnitude in a block gets the code 0, which means -16 scales.
    """
    blocks_NK = weight_OI.float().reshape(-1, Format.Q5_0.block)
    largest_N1 = blocks_NK.gather(1, blocks_NK.abs().argmax(1, keepdim=True))
    scale_N1 = (largest_N1 / -_HALF).to(torch.float16)
    steps_N1 = torch.where(scale_N1 == 0, torch.ones_like(scale_N1), scale_N1).float()
    codes_NK = ((blocks_NK / steps_N1).round() + _HALF).clamp(0, 2 * _HALF - 1).to(torch.uint8)
    low_NK, high_NK = (codes_NK & 15).chunk(2, dim=1)
    bits_NB8 = (codes_NK >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
    packed_NB = torch.cat((scale_N1.view(torch.uint8), bits_NB8.sum(-1).to(torch.uint8), low_NK | high_NK << 4), 1)
    return StoredTensor(Format.Q5_0, tuple(weight_OI.shape), packed_NB.view(len(weight_OI), -1))


def in_q4_1(weight_OI: Tensor) -> StoredTensor:
    """Quantize a matrix to Q4_1. Raises ValueError unless its rows are whole blocks."""
    blocks_NK = weight_OI.float().reshape(-1, Format.Q4_1.block)
    least_N1, most_N1 = blocks_NK.aminmax(dim=1, keepdim=True)
    scale_N1, least_N1 = ((most_N1 - least_N1) / _HIGHEST).to(torch.float16), least_N1.to(torch.float16)
    steps_N1 = torch.where(scale_N1 == 0, torch.ones_like(scale_N1), scale_N1).float()
    codes_NK = ((blocks_NK - least_N1.float()) / steps_N1).round().clamp(0, _HIGHEST).to(torch.uint8)
    low_NK, high_NK = codes_NK.chunk(2, dim=1)
    packed_NB = torch.cat((scale_N1.view(torch.uint8), least_N1.view(torch.uint8), low_NK | high_NK << 4), 1)
    return StoredTensor(Format.Q4_1, tuple(weight_OI.shape), packed_NB.view(len(weight_OI), -1))
