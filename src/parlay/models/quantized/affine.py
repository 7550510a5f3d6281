"""Affinely quantized matrices: integer codes with a scale per group of inputs, converted to the blocks that decoders
multiply."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parlay.models.weights.formats import Format
from parlay.models.weights.shapes import BadCheckpoint
from parlay.models.weights.stored import StoredTensor

_BLOCK, _GROUP = 32, 128  # inputs
_NIBBLE = 15  # the largest four-bit code
_MIDDLE = 8  # offset of Q4_0's codes


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """A matrix ``scale * (code - zero)``, or ``scale * code + minimum`` if it has minimums.

    ``codes_OI`` is uint8; scales, integer ``zeros_OG`` and ``minimums_OG`` are per group of inputs. ``group_I`` is each
    input's group, if groups are not of neighbouring inputs; blocks then have the inputs sorted by group.
    """

    codes_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None = None
    minimums_OG: Tensor | None = None
    group_I: Tensor | None = None

    def check_scales(self, name: str) -> None:
        """Raises BadCheckpoint for scales or minimums that are not finite; ``name`` is the matrix's."""
        if not all(numbers.isfinite().all() for numbers in (self.scales_OG, self.minimums_OG) if numbers is not None):
            raise BadCheckpoint(f"{name}: some scales are not finite: download or copy the checkpoint again")

    def obstacle(self) -> str | None:
        """Why no block format holds these numbers exactly; None if one does."""
        inputs, groups = self.codes_OI.shape[1], self.scales_OG.shape[1]
        if self.group_I is not None and len(set(self.group_I.bincount(minlength=groups).tolist())) > 1:
            return "groups have different numbers of inputs"
        if inputs % groups or inputs // groups % _BLOCK:
            return f"groups of {inputs / groups:g} inputs are no whole blocks of {_BLOCK}"
        if not all(_is_half(numbers) for numbers in (self.scales_OG, self.minimums_OG) if numbers is not None):
            return "half precision does not hold its scales exactly"
        if self.codes_OI.max() > _NIBBLE:
            return self._obstacle_of_bytes()
        return None

    def _obstacle_of_bytes(self) -> str | None:
        if self.zeros_OG is None:
            return "codes of eight bits have minimums"
        least, most = torch.aminmax(self.codes_OI.to(torch.int16) - self._by_input(self.zeros_OG.to(torch.int16)))
        return None if least >= -128 and most <= 127 else "codes less their zeros take more than eight bits"

    def in_blocks(self) -> StoredTensor:
        """Convert the matrix to the smallest blocks that hold its numbers exactly; `obstacle` must be None."""
        if self.group_I is not None:
            order = self.group_I.argsort(stable=True)
            return replace(replace(self, codes_OI=self.codes_OI[:, order], group_I=None).in_blocks(), columns=order)
        outputs, inputs = self.codes_OI.shape
        scales_OK2 = self._by_block(self.scales_OG.half()).contiguous().view(torch.uint8).view(outputs, -1, 2)
        codes_OKB = self.codes_OI.reshape(outputs, -1, _BLOCK)
        if self.minimums_OG is not None:
            minimums_OK2 = self._by_block(self.minimums_OG.half()).contiguous().view(torch.uint8).view(outputs, -1, 2)
            return self._stored(Format.Q4_1, scales_OK2, minimums_OK2, _nibbles(codes_OKB))
        assert self.zeros_OG is not None, "an affine matrix has zeros or minimums"
        zeros_OK1 = self._by_block(self.zeros_OG.to(torch.int16))[:, :, None]
        if self.codes_OI.max() > _NIBBLE:
            codes_OKB = (codes_OKB.to(torch.int16) - zeros_OK1).to(torch.int8).view(torch.uint8)
            return self._stored(Format.Q8_0, scales_OK2, codes_OKB)
        if inputs // self.scales_OG.shape[1] % _GROUP == 0:
            return self._in_groups()
        if (self.zeros_OG == _MIDDLE).all():
            return self._stored(Format.Q4_0, scales_OK2, _nibbles(codes_OKB))
        zeros_OK2 = torch.cat((zeros_OK1, torch.zeros_like(zeros_OK1)), 2).to(torch.uint8)
        return self._stored(Format.Q4_Z, scales_OK2, zeros_OK2, _nibbles(codes_OKB))

    def _in_groups(self) -> StoredTensor:
        """Convert to blocks of 128 inputs that share a scale and a zero."""
        assert self.zeros_OG is not None, "groups have zeros"
        outputs, times = len(self.codes_OI), self.codes_OI.shape[1] // self.scales_OG.shape[1] // _GROUP
        scales_OG1 = self.scales_OG.half().repeat_interleave(times, 1)[:, :, None].contiguous()
        zeros_OG1 = self.zeros_OG.to(torch.uint8).repeat_interleave(times, 1)[:, :, None]
        codes_OGB = _nibbles(self.codes_OI.reshape(outputs, -1, _BLOCK)).reshape(outputs, -1, _GROUP // 2)
        return self._stored(
            Format.Q4_Z128, scales_OG1.view(torch.uint8), zeros_OG1, torch.zeros_like(zeros_OG1), codes_OGB
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers ``[O, I]``, each computed in float32 and rounded once."""
        scales_OI, codes_OI = self._by_input(self.scales_OG.float()), self.codes_OI.float()
        if self.minimums_OG is not None:
            return (scales_OI * codes_OI + self._by_input(self.minimums_OG.float())).to(dtype)
        assert self.zeros_OG is not None, "an affine matrix has zeros or minimums"
        return (scales_OI * (codes_OI - self._by_input(self.zeros_OG.float()))).to(dtype)

    def _by_input(self, numbers_OG: Tensor) -> Tensor:
        """Expand numbers per group to numbers per input, ``[O, I]``."""
        inputs, groups = self.codes_OI.shape[1], numbers_OG.shape[1]
        group_I = self.group_I
        if group_I is None:
            group_I = torch.arange(inputs) // -(-inputs // groups)
        return numbers_OG[:, group_I.long()]

    def _by_block(self, numbers_OG: Tensor) -> Tensor:
        """Expand numbers per group to numbers per block, ``[O, blocks]``."""
        return numbers_OG.repeat_interleave(self.codes_OI.shape[1] // numbers_OG.shape[1] // _BLOCK, 1)

    def _stored(self, format: Format, *parts_OKB: Tensor) -> StoredTensor:
        """Concatenate the bytes of each block's parts."""
        return StoredTensor(format, tuple(self.codes_OI.shape), torch.cat(parts_OKB, 2).flatten(1))


def _is_half(numbers: Tensor) -> bool:
    """Whether float16 holds ``numbers``, of any shape, exactly."""
    return bool((numbers.half().float() == numbers.float()).all())


def _nibbles(codes_OKB: Tensor) -> Tensor:
    """Pack four-bit codes of blocks into bytes ``[O, K, B / 2]``: the first half of a block goes to the low nibbles."""
    low, high = codes_OKB.chunk(2, 2)
    return low | high << 4
