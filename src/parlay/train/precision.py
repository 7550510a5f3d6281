"""Chooses the precision in which a training step is fastest on this machine."""

from __future__ import annotations

import time
from functools import cache

import torch

AUTO, BFLOAT16 = "auto", "bfloat16"
PRECISIONS = (AUTO, BFLOAT16, "float32")
_SIZE, _CALLS = 512, 5


@cache
def half_pays() -> bool:
    """Whether products in bfloat16 are faster than in float32; without instructions for it they are far slower."""
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


def mixed(precision: str = AUTO) -> torch.autocast:
    """A context in which products are computed in bfloat16, if that is asked for, or faster and nothing is."""
    enabled = half_pays() if precision == AUTO else precision == BFLOAT16
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def _seconds(dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    least = float("inf")
    for _ in range(_CALLS):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        least = min(least, time.perf_counter() - began)
    return least
