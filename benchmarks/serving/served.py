"""`parlay serve`, or another command that takes requests, as a process of its own, for as long as something asks it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

PATIENCE = 60.0
"""The most seconds that a process may take to end after the signal."""


@contextmanager
def served(*words: str) -> Iterator[str]:
    """The address, once it takes requests. ``words`` are those of the command: models and flags.

    Raises ValueError when the server does not start; why is on standard error.
    """
    with started("serve", "--port", "0", *words) as (url, _):
        yield url


@contextmanager
def started(*words: str, read_errors: Callable[[IO[str]], None] | None = None) -> Iterator[tuple[str, int]]:
    """The address that a command of parlay says first, and its process. A thread runs ``read_errors`` on what it logs.

    Raises ValueError when it does not start.
    """
    command = (sys.executable, "-m", "parlay", *words)
    errors = None if read_errors is None else subprocess.PIPE
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        try:
            assert process.stdout is not None
            if read_errors is not None and process.stderr is not None:
                threading.Thread(target=read_errors, args=(process.stderr,), daemon=True).start()
            welcome = process.stdout.readline()
            if not welcome:
                raise ValueError(f"parlay {' '.join(words)} did not start")
            yield welcome.split()[-1], process.pid
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
