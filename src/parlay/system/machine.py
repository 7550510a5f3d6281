"""Finds the processor's name and the free memory, and returns freed memory to the system."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

_CONTROL_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""For versions 2 and 1 of control groups: the file with the limit, the file with the usage, and the field of
memory.stat with the reclaimable part of the usage."""


def cpu_model() -> str:
    """Return the processor's name with its family and model numbers, where Linux tells them."""
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
    """Return freed pages to the system; glibc otherwise keeps them. The call does not hold the GIL."""
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


def available_bytes(cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Return the bytes of memory that are free now, within the limit of the process's control group."""
    return max(0, min(_host_bytes(proc), *_left_by_groups(cgroups)))


def _host_bytes(proc: Path) -> int:
    try:
        return number_in(proc / "meminfo", "MemAvailable:") * 1024
    except (OSError, ValueError):
        names = [name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in os.sysconf_names]
        return os.sysconf(names[0]) * os.sysconf("SC_PAGE_SIZE") if names else 4 << 30


def _left_by_groups(cgroups: Path) -> Iterator[int]:
    """Yield the bytes that each control group still allows, and a very large number, so that there is a minimum."""
    yield 1 << 62
    for limit, used, reclaimable in _CONTROL_GROUPS:
        try:
            most = int((cgroups / limit).read_text())  # "max" where there is no limit
            taken = int((cgroups / used).read_text())
            kept = number_in((cgroups / limit).with_name("memory.stat"), reclaimable)
        except (OSError, ValueError):
            continue
        yield most - taken + kept


def number_in(file: Path, name: str) -> int:
    """Return the number after a name in a file of names and numbers. Raises ValueError if the name is missing."""
    for line in file.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{file} has no {name}")
