"""Memory of this process or its accelerator: now, and the peak since `forget_peak`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK = "5"
"""What is written there to have Linux reset the peak of the resident memory."""


def forget_peak(device: str) -> None:
    """Reset the peak. Where the system can't, the peak is that of the whole process so far."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text(_PEAK)
    except OSError:
        return


def peak_bytes(device: str) -> int:
    """Peak memory on a CUDA device, or else of the process's resident memory; 0 if the system does not say."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return _largest_ever()


def resident_bytes() -> int:
    """Resident memory of this process now, on Linux."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _largest_ever() -> int:
    if sys.platform == "win32":
        return 0
    import resource  # there is none on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest
