"""Weights as a file stores them: rows of blocks, each of small whole numbers and their scales.

The formats are ggml's, which GGUF files hold. A block is a fixed number of neighbouring weights of a row, in a fixed
number of bytes. Nothing here changes a value.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from parlay.types import ParlayError


class Format(Enum):
    """A way to store weights: ``(number in ggml and in GGUF files, weights in a block, bytes of a block)``."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)
    BF16 = (30, 1, 2)
    MXFP4 = (39, 32, 17)

    def __init__(self, number: int, block: int, block_bytes: int) -> None:
        self.number, self.block, self.block_bytes = number, block, block_bytes

    @property
    def plain(self) -> torch.dtype | None:
        """The torch type of a format whose weights are ordinary numbers, else None."""
        return _PLAIN.get(self.number)

    def row_bytes(self, length: int) -> int:
        """Bytes of a row of so many weights; ValueError unless whole blocks make it up."""
        if length % self.block:
            raise ValueError(f"a row of {length} weights is no whole number of {self.name} blocks of {self.block}")
        return length // self.block * self.block_bytes


_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}

FORMATS = {format.number: format for format in Format}
"""Formats by their number in GGUF files."""


class DamagedWeights(ParlayError):
    """Weights that can't be meant: infinite, or no numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of ``shape``, last dimension fastest, as in torch.

    ``data`` holds the blocks, uint8 ``[*shape[:-1], row_bytes]``. Rows can be reordered without touching a value, for
    blocks never cross from one into the next: row i of the tensor is row ``order[i]`` of ``data``, or row i where order
    is None. ``file`` is the mapping of a whole file that ``data`` lies in, if it does; nobody may write to it then.
    ``origin`` is what messages call the tensor.
    """

    format: Format
    shape: tuple[int, ...]
    data: Tensor
    file: mmap.mmap | None = None
    origin: str = "a tensor"
    order: Tensor | None = None

    def __post_init__(self) -> None:
        expected = (*self.shape[:-1], self.format.row_bytes(self.shape[-1]))
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != expected:
            raise ValueError(
                f"{self.format.name} {list(self.shape)} wants bytes {list(expected)}, not {self.data.shape}"
            )

    @property
    def rows(self) -> Tensor:
        """The rows in the tensor's order, uint8 ``[*shape[:-1], row_bytes]``; a copy where ``data`` has another."""
        return self.data if self.order is None else self.data[self.order]

    def parts(self, rows: int) -> Iterator[StoredTensor]:
        """So many rows at a time, the last ones fewer; all at once where they are in another order."""
        if self.order is not None:
            yield self
            return
        for start in range(0, len(self.data), rows):
            part = self.data[start : start + rows]
            yield replace(self, shape=(len(part), *self.shape[1:]), data=part)

    def chosen(self, ids_N: Tensor) -> StoredTensor:
        """The rows of these ids, int64 ``[n]``, as a tensor of their own."""
        data = self.data[ids_N if self.order is None else self.order[ids_N]]
        return replace(self, shape=(len(data), *self.shape[1:]), data=data, file=None, order=None)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For one who reads it once: it is checked before, and its pages of the file are given back after.

        Without that, a file and what is made of it would be in memory together. Raises DamagedWeights for numbers or
        scales that are not finite.
        """
        if not is_finite(self):
            raise DamagedWeights(f"{self.origin} holds numbers that are not finite: the file is damaged")
        yield
        if self.file is not None:
            begin = int(self.data.storage_offset())
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self.file.madvise(mmap.MADV_DONTNEED, page, begin - page + self.data.nbytes)


_EXPONENTS = {Format.F32: (0x7F80, (1,)), Format.BF16: (0x7F80, (0,)), Format.F16: (0x7C00, (0,))} | {
    Format.Q6_K: (0x7C00, (104,)),
    **dict.fromkeys((Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K), (0x7C00, (0, 1))),
    **dict.fromkeys((Format.Q4_0, Format.Q5_0, Format.Q8_0, Format.IQ4_NL, Format.IQ4_XS), (0x7C00, (0,))),
}
"""Bits that are all set in infinities and in what is no number, and the words of 16 bits in a block that have them."""
_CHUNK = 1 << 15  # so that what is made on the way stays in the processor


def is_finite(stored: StoredTensor) -> bool:
    """Whether every number of a plain format, and every scale of another, is finite. MXFP4 has no other scales."""
    if stored.format not in _EXPONENTS:
        return True
    mask, places = _EXPONENTS[stored.format]
    blocks = stored.data.numpy().reshape(-1).view(np.uint16).reshape(-1, stored.format.block_bytes // 2)
    return not any(  # in numpy, which starts no threads of its own: several of ours may be here
        ((blocks[start : start + _CHUNK, place] & mask) == mask).any()
        for start in range(0, len(blocks), _CHUNK)
        for place in places
    )
