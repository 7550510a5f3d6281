"""How much memory is free on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

_CONTROL_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of the limit and of what is used, and which part of that is given up on demand: version 2, then 1."""


def free_bytes(device: torch.device, cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Bytes that can be had on the device now; on a host no more than the limit of our control group leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return max(0, min(_host_bytes(proc), *_left_by_groups(cgroups)))


def _host_bytes(proc: Path) -> int:
    try:
        return _field(proc / "meminfo", "MemAvailable:") * 1024
    except (OSError, ValueError):
        names = [name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in os.sysconf_names]
        return os.sysconf(names[0]) * os.sysconf("SC_PAGE_SIZE") if names else 4 << 30


def _left_by_groups(cgroups: Path) -> Iterator[int]:
    """What each control group that limits us leaves; a very large number beside them."""
    yield 1 << 62
    for limit, used, reclaimable in _CONTROL_GROUPS:
        try:
            most = int((cgroups / limit).read_text())  # "max" where there is no limit
            taken = int((cgroups / used).read_text())
            kept = _field((cgroups / limit).with_name("memory.stat"), reclaimable)
        except (OSError, ValueError):
            continue
        yield most - taken + kept


def _field(file: Path, name: str) -> int:
    """The number after a name in a file of names and numbers. Raises ValueError when it is not there."""
    for line in file.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{file} has no {name}")
