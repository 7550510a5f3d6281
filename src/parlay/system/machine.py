"""The name of the processor, and freed memory given back to the system."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path


def cpu_model() -> str:
    """The processor's own name and its family and model numbers, where Linux tells them."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or "unknown"
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    numbers = ", ".join(f"{name} {fields[name]}" for name in ("cpu family", "model") if name in fields)
    return f"{fields.get('model name', 'unknown')} ({numbers})"


def release_freed() -> None:
    """Give freed pages back where the C library keeps them for later, as glibc does. It holds no lock of Python."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        found: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # another C library
        return None
    return found
