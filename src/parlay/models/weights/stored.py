"""Weights as a file stores them: rows of blocks, each with integer codes and their scales.

The formats are ggml's, as in GGUF files. A block has a fixed number of neighbouring weights of a row, and a fixed
number of bytes. Nothing here changes a value.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from parlay.models.weights.formats import INDEXED, DamagedWeights, Format

if TYPE_CHECKING:
    from parlay.models.gguf.packing_ahead import PackingAhead


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of ``shape`` with the last dimension fastest, as in torch.

    ``data`` are its blocks, uint8 ``[*shape[:-1], row_bytes]``. Rows can be permuted, as blocks never cross from one
    row to the next: row i of the tensor is row ``order[i]`` of ``data``, or row i if order is None. Column k of the
    blocks is column ``columns[k]`` of the tensor, if inputs that share a scale are not neighbours. ``file`` is the
    mapped file that contains ``data``, if any; nobody may write to it then. ``origin`` names the tensor in messages.
    ``ahead`` is the packing of the file's matrices that is under way, if any.
    """

    format: Format
    shape: tuple[int, ...]
    data: Tensor
    file: mmap.mmap | None = None
    origin: str = "a tensor"
    order: Tensor | None = None
    columns: Tensor | None = None
    ahead: PackingAhead | None = None

    def __post_init__(self) -> None:
        expected = (*self.shape[:-1], self.format.row_bytes(self.shape[-1]))
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != expected:
            raise ValueError(
                f"{self.format.name} {list(self.shape)} wants bytes {list(expected)}, not {self.data.shape}"
            )

    @property
    def rows(self) -> Tensor:
        """The rows in the tensor's order, uint8 ``[*shape[:-1], row_bytes]``; a copy if they are permuted in
        ``data``."""
        return self.data if self.order is None else self.data[self.order]

    def parts(self, rows: int) -> Iterator[StoredTensor]:
        """Yield ``rows`` rows at a time; all at once if they are permuted."""
        if self.order is not None:
            yield self
            return
        for start in range(0, len(self.data), rows):
            part = self.data[start : start + rows]
            yield replace(self, shape=(len(part), *self.shape[1:]), data=part)

    def chosen(self, ids_N: Tensor) -> StoredTensor:
        """The rows with these ids, int64 ``[n]``, as a tensor."""
        data = self.data[ids_N if self.order is None else self.order[ids_N]]
        return replace(self, shape=(len(data), *self.shape[1:]), data=data, file=None, order=None, ahead=None)

    def taken(self, rows: slice) -> StoredTensor:
        """Some ``rows``, which must not be permuted, as a tensor in the same memory."""
        assert self.order is None, "the rows were not put in another order yet"
        data = self.data[rows]
        return replace(self, shape=(len(data), *self.shape[1:]), data=data)

    def item(self, index: int) -> StoredTensor:
        """Matrix ``[O, I]`` number ``index`` of a stack ``[E, O, I]``, in the same memory."""
        return replace(self, shape=self.shape[1:], data=self.data[index])

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context for reading the tensor once: its numbers are checked first, and its pages of the file are released
        afterwards.

        Otherwise the file and what is made of it would be in memory together. Raises DamagedWeights for numbers or
        scales that are not finite.
        """
        if not is_finite(self):
            raise DamagedWeights(self.origin)
        yield
        self.give_back()

    def give_back(self) -> None:
        """Let the system reclaim the pages of the file, which nobody will read again."""
        if self.file is not None:
            begin = int(self.data.storage_offset())
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self.file.madvise(mmap.MADV_DONTNEED, page, begin - page + self.data.nbytes)


_EXPONENTS = {Format.F32: (0x7F80, (1,)), Format.BF16: (0x7F80, (0,)), Format.F16: (0x7C00, (0,))} | {
    Format.Q2_K: (0x7C00, (40, 41)),
    Format.Q3_K: (0x7C00, (54,)),
    Format.Q6_K: (0x7C00, (104,)),
    **dict.fromkeys((Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K), (0x7C00, (0, 1))),
    **dict.fromkeys(
        (Format.Q4_0, Format.Q4_Z, Format.Q4_Z128, Format.Q5_0, Format.Q8_0, Format.IQ4_NL, Format.IQ4_XS),
        (0x7C00, (0,)),
    ),
    **dict.fromkeys(INDEXED - {Format.IQ1_M}, (0x7C00, (0,))),
}
"""The bits that are all set in infinities and NaN, and the 16-bit words of a block that contain them."""
_CHUNK = 1 << 15  # so that intermediate results stay in the processor's cache


def is_finite(stored: StoredTensor) -> bool:
    """Whether all numbers of a plain format, or all scales of a quantized one, are finite. MXFP4's scales always
    are."""
    if stored.format is Format.IQ1_M:  # the exponent is in the highest bits of the last two words
        words = stored.data.numpy().reshape(-1).view(np.uint16).reshape(-1, stored.format.block_bytes // 2)
        return not ((words[:, 27] & 0x7000 == 0x7000) & (words[:, 26] & 0xC000 == 0xC000)).any()
    if stored.format not in _EXPONENTS:
        return True
    mask, places = _EXPONENTS[stored.format]
    blocks = stored.data.numpy().reshape(-1).view(np.uint16).reshape(-1, stored.format.block_bytes // 2)
    return not any(  # numpy, as torch would start threads in each of our threads
        ((blocks[start : start + _CHUNK, place] & mask) == mask).any()
        for start in range(0, len(blocks), _CHUNK)
        for place in places
    )
