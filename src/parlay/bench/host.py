"""Reads this process's memory and how busy the machine's cores are, and runs processes that keep cores busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK = "5"
"""If this is written to `_CLEAR`, Linux resets the process's peak of resident memory."""


def forget_peak(device: str) -> None:
    """Reset the peak of `peak_bytes`. If the system can't, the peak stays the highest value since the process began."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text(_PEAK)
    except OSError:
        return


def peak_bytes(device: str) -> int:
    """Return the peak memory on a CUDA device, or else the process's peak resident memory; 0 if it is not known."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return _largest_ever()


def resident_bytes() -> int:
    """Return this process's present resident memory in bytes. Works on Linux only."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _largest_ever() -> int:
    if sys.platform == "win32":
        return 0
    import resource  # there is none on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


_TIMES = Path("/proc/stat")
_LOOK_SECONDS = 0.25

_SPIN = """\
import os, sys
parent = int(sys.argv[1])
print(flush=True)
while os.getppid() == parent:  # ends also if the parent was killed
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy with processes that run a loop, until the body ends or fails."""
    with ExitStack() as stack:
        for burner in [_start(stack) for _ in range(count)]:
            assert burner.stdout is not None
            burner.stdout.readline()  # it spins from now on
        yield


def _start(stack: ExitStack) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-S", "-E", "-c", _SPIN, str(os.getpid()))
    burner = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL))
    stack.callback(burner.kill)  # registered last, so it runs before the process is waited for
    return burner


def busy_cores() -> float:
    """Return how many cores are busy, measured over a quarter of a second; outside Linux the last minute's load."""
    if not _TIMES.exists():
        return os.getloadavg()[0]
    before = _times()
    time.sleep(_LOOK_SECONDS)
    busy, idle = (now - then for now, then in zip(_times(), before, strict=True))
    return (os.cpu_count() or 1) * busy / max(busy + idle, 1)


BUSY_CORES = 0.3
"""If more cores than this are busy before a measurement, its result is marked."""


def busy_note(cores: float) -> str:
    """Say what the busy cores mean for the figures; an empty text if there are too few to matter."""
    if cores <= BUSY_CORES:
        return ""
    return f"Other processes keep {cores:.1f} cores busy: speeds are too low, and ratios less sure."


def _times() -> tuple[int, int]:
    """Return the busy and the idle clock ticks of all cores together, since the system started."""
    user, nice, system, idle, waiting, *interrupts = map(int, _TIMES.read_text().split("\n")[0].split()[1:9])
    return user + nice + system + sum(interrupts), idle + waiting
