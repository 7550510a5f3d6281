"""How long `parlay generate` takes from the command to the first piece of text, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.figures.results import Block, Results, Row
from benchmarks.figures.setup import MINI, Setup

COMMAND = (sys.executable, "-m", "parlay", "generate", "The old man looked at the sea and", "--max-tokens", "32")
LIMIT = 120


def launch(setup: Setup, results: Results) -> None:
    """One launch that is not counted warms the disk's cache; then some that are."""
    blocks = [Block("launch", MINI, "", number, 0) for number in range(setup.scale.launches)]
    pending = [block for block in blocks if not results.has(block)]
    if pending:
        first_text()
    for block in pending:
        first, whole = first_text()
        results.add([Row(**block._asdict(), system="parlay generate", first_seconds=first, values={"whole": whole})])


def first_text() -> tuple[float, float]:
    """Seconds to the first byte on standard output, and to the end of the process.

    Raises:
        ValueError: when the command fails or writes nothing.
    """
    began = time.perf_counter()
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first_bytes = os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - began
        _, errors = process.communicate(timeout=LIMIT)
    whole = time.perf_counter() - began
    if process.returncode or not first_bytes:
        raise ValueError(f"parlay generate exited with {process.returncode}: {errors.decode(errors='replace')[-300:]}")
    return first, whole
