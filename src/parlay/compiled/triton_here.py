"""Where kernels in Triton may run: on CUDA devices, and on CPUs in Triton's interpreter, if that is asked for."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

INTERPRET = "TRITON_INTERPRET"
"""Triton's own variable: with 1, its kernels run in an interpreter, on CPUs, which takes hundreds of times as long."""


def asked_for(device: torch.device) -> bool:
    """Whether Triton's kernels are to run on this device, if Triton is installed."""
    return device.type == "cuda" or (device.type == "cpu" and interpreted())


@cache
def interpreted() -> bool:
    """Whether the interpreter is asked for. The variable is read once, not in every step."""
    return os.environ.get(INTERPRET) == "1"


def check() -> None:
    """Raise ImportError where Triton is not installed."""
    if find_spec("triton") is None:
        raise ImportError("Triton is not installed")


def reason(error: Exception) -> str:
    """Say in one line why Triton's kernels can't be used; compilers raise errors of many kinds and lengths."""
    words = " ".join(str(error).split())[:200]
    return words if isinstance(error, ImportError) else f"{type(error).__name__}: {words}"
