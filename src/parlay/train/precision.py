"""In which precision a training step is fastest here."""

from __future__ import annotations

import time
from functools import cache

import torch

_SIZE, _CALLS = 512, 5


@cache
def half_pays() -> bool:
    """Whether products in bfloat16 are quicker than in float32; without instructions for it they are far slower."""
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


def mixed() -> torch.autocast:
    """Products in bfloat16 where that is quicker."""
    return torch.autocast("cpu", torch.bfloat16, enabled=half_pays())


def _seconds(dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    least = float("inf")
    for _ in range(_CALLS):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        least = min(least, time.perf_counter() - began)
    return least
