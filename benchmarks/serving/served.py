"""Runs `parlay serve`, or another command that takes requests, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

PATIENCE = 60.0
"""The time limit in seconds for a process to end after the signal."""


@contextmanager
def served(*words: str) -> Iterator[str]:
    """Start a server, yield its address when it takes requests, and end it. ``words`` are the command's models and
    flags.

    Raises ValueError if the server does not start; standard error says why.
    """
    with started("serve", "--port", "0", *words) as (url, _):
        yield url


@contextmanager
def started(*words: str, read_errors: Callable[[IO[str]], None] | None = None) -> Iterator[tuple[str, int]]:
    """Start a command of parlay, and yield the address that it prints first and its process number.

    A thread runs ``read_errors`` on its standard error. Raises ValueError if it does not start.
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
