"""Measures the time that a process of `parlay generate` takes from its start to the first piece of text."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.setup import SMOLLM2, Setup
from parlay.bench.records import Cell, Results, Row
from parlay.strategies.entry import DEFAULT_STRATEGY

WORDS = ("generate", "The old man looked at the sea and", "--model", SMOLLM2, "--max-tokens", "32")
COMMAND = (sys.executable, "-m", "parlay", *WORDS)
LIMIT = 120
CELL = Cell(part="launch", model=SMOLLM2, strategy=DEFAULT_STRATEGY, workload="parlay generate")


def launch(setup: Setup, results: Results) -> None:
    """Time several launches. The first launch fills the disk cache and is not counted."""
    pending = range(len(results.of(CELL)), setup.scale.launches)
    if pending:
        first_text()
    for number in pending:
        first, whole = first_text()
        results.add([Row(cell=CELL, round=number, requests=1, ttft=(first,), seconds=whole)])


def first_text() -> tuple[float, float]:
    """Return the seconds to the first byte on standard output, and to the end of the process.

    Raises ValueError if the command fails or writes nothing.
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
