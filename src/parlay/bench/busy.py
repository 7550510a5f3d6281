"""Machines that others use too: measures how busy they are, and runs processes that keep cores busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_TIMES = Path("/proc/stat")
_LOOK_SECONDS = 0.25

_SPIN = """\
import os, sys
parent = int(sys.argv[1])
print(flush=True)
while os.getppid() == parent:  # nobody ends it when the parent was killed
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def burning(count: int) -> Iterator[None]:
    """While the body runs, ``count`` processes spin in a loop; they are ended however the body ends."""
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
    """How many cores are busy, measured over a quarter of a second; outside Linux the load of the last minute."""
    if not _TIMES.exists():
        return os.getloadavg()[0]
    before = _times()
    time.sleep(_LOOK_SECONDS)
    busy, idle = (now - then for now, then in zip(_times(), before, strict=True))
    return (os.cpu_count() or 1) * busy / max(busy + idle, 1)


def _times() -> tuple[int, int]:
    """Busy and idle ticks of all cores together."""
    user, nice, system, idle, waiting, *interrupts = map(int, _TIMES.read_text().split("\n")[0].split()[1:9])
    return user + nice + system + sum(interrupts), idle + waiting
