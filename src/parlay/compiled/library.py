"""Finds and loads the compiled library, or says in one line why there is none."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import lru_cache
from pathlib import Path

from parlay.compiled import structs
from parlay.compiled.build import LIBRARY, NAMES, SYSTEMS, digest

SWITCH = "PARLAY_COMPILED"
"""Environment variable: ``0`` keeps to torch's operators, the name of an instruction set allows none beyond it."""

_WIDEST = {"default": "plain", "avx2": "avx_vnni"}
"""The widest instruction set on x86 for values of ATEN_CPU_CAPABILITY, torch's own variable for the same choice."""


class NotLoaded(Exception):
    """Why torch runs the decoder instead, in one line."""


class NotBuilt(NotLoaded):
    """The library is missing or stale, though it could run here: to build or install it again helps."""


def load() -> structs.Core:
    """Return the table of functions for this processor; raises NotLoaded, and ValueError for a bad `SWITCH`."""
    wanted = os.environ.get(SWITCH) or _widest()
    if wanted == "0":
        raise NotLoaded(f"{SWITCH}=0")
    return _load(LIBRARY, wanted)


def _widest() -> str:
    if platform.machine() in ("aarch64", "arm64"):
        return "dotprod"
    return _WIDEST.get(os.environ.get("ATEN_CPU_CAPABILITY", "").lower(), NAMES[-1])


@lru_cache
def _load(path: Path, widest: str) -> structs.Core:
    if not path.exists():
        if sys.platform not in SYSTEMS:
            raise NotLoaded(f"it is for Linux and macOS, not {sys.platform}")
        raise NotBuilt("it was not built: run python -m parlay.compiled.build, which needs a C compiler")
    try:
        library = ctypes.CDLL(str(path))
        library.parlay_sources.restype = ctypes.c_char_p
        library.parlay_core.restype = ctypes.POINTER(structs.Core)
    except (OSError, AttributeError) as error:
        raise NotBuilt(f"it can't be loaded: {error}") from None
    if library.parlay_sources() != digest().encode():
        raise NotBuilt("it was built of other sources: run python -m parlay.compiled.build")
    core = library.parlay_core(widest.encode())
    if not core:
        raise ValueError(f"{SWITCH}={widest} is neither 0 nor one of {', '.join(NAMES)} that this library has")
    chosen: structs.Core = core.contents
    return chosen
