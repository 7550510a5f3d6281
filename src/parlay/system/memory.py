"""Freed memory of the process, given back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


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
