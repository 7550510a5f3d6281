"""Processes that burn a core each, so that a measurement can be made on a machine that others use too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
    """So many processes spin in a loop, from the first line of the body to its end, however that comes."""
    with ExitStack() as stack:
        for burner in [_start(stack) for _ in range(count)]:
            assert burner.stdout is not None
            burner.stdout.readline()  # it spins from now on
        yield


def _start(stack: ExitStack) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-S", "-E", "-c", _SPIN, str(os.getpid()))
    burner = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL))
    stack.callback(burner.kill)  # the stack ends it first and waits for it then
    return burner
