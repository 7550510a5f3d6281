"""`parlay serve` as a process of its own, for as long as something asks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 60.0
"""Seconds that it may take to end once it is told to."""


@contextmanager
def served(*words: str) -> Iterator[str]:
    """The address, once it takes requests. ``words`` are those of the command: models and flags.

    Raises ValueError when the server does not start; why is on standard error.
    """
    command = (sys.executable, "-m", "parlay", "serve", "--port", "0", *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            welcome = process.stdout.readline()
            if not welcome:
                raise ValueError(f"parlay serve {' '.join(words)} did not start")
            yield welcome.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
