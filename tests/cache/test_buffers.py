"""Large buffers are zeros of the shape that was asked for, and their memory goes back to the system with them."""

from __future__ import annotations

import sys

import pytest
import torch

from parlay.bench.host import resident_bytes
from parlay.cache import pages

CPU = torch.device("cpu")
MEBI = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [(2, 0, 3), (2, 5, 3), (3, 1000, 257)])
def test_a_buffer_is_zeros_that_can_be_written(size: tuple[int, ...], dtype: torch.dtype) -> None:
    buffer = pages.zeros(size, dtype, CPU)
    assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == (size, dtype, True)
    assert not buffer.any()
    buffer += 1
    assert buffer.all()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the C library is trusted with it")
def test_what_is_let_go_is_not_resident_any_more_whatever_lies_around_it() -> None:
    held = [pages.zeros((2 + place % 3, MEBI), torch.uint8, CPU).fill_(1) for place in range(60)]
    before = resident_bytes()
    freed = sum(buffer.numel() for buffer in held[::2])
    part = held[0][:, 5:]  # a view keeps its buffer
    del held[::2]
    assert before - resident_bytes() > 0.9 * (freed - 2 * MEBI)
    assert part.all()
