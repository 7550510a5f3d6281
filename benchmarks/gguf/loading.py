"""Measures the loading of a file: time and memory until its weights are packed, and processes to their first token.

Run as a program, it loads one file and prints the measurements as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from parlay.bench.provenance import ROOT
from parlay.bench.records import Cell, Row
from parlay.cli.opening import uncollected

LOAD, AGAIN, READ, READ_NEW, LAUNCH = "load", "again", "read", "read into new memory", "parlay generate"
PART = "loading"
_CHUNK = 1 << 24


def measure(path: Path, rounds: int, threads: int) -> Iterator[Row]:
    """Yield rows for loading a file and for only reading it, round by round. The first round is not counted."""
    for number in range(-1, rounds):
        cell = Cell(part=PART, model=path.stem, strategy=LOAD, workload=LOAD)
        loaded = _run(["-m", "benchmarks.gguf.loading", str(path), str(threads)])
        taken = json.loads(loaded[1])
        rows = [
            Row(cell=cell, round=number, seconds=taken[LOAD], values={"memory": taken["memory"] / taken["size"]}),
            *(
                Row(
                    cell=Cell(part=PART, model=path.stem, strategy=LOAD, workload=name),
                    round=number,
                    seconds=taken[name],
                )
                for name in (AGAIN, READ, READ_NEW)
            ),
        ]
        yield from rows if number >= 0 else ()


def launches(path: Path, rounds: int, threads: int) -> Iterator[Row]:
    """Time whole processes of `parlay generate` for one token."""
    for number in range(-1, rounds):
        words = ["-m", "parlay", "generate", "The sea", "--model", str(path), "--max-tokens", "1"]
        seconds, _ = _run([*words, "--threads", str(threads)])
        cell = Cell(part=PART, model=path.stem, strategy=LAUNCH, workload="1 token")
        yield from [Row(cell=cell, round=number, seconds=seconds)] if number >= 0 else []


def _run(words: list[str]) -> tuple[float, str]:
    """Return the seconds that a process takes, and its standard output."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(("src", "."))},
    )
    return time.perf_counter() - began, done.stdout


def _load(path: Path, count: int) -> dict[str, float]:
    with uncollected():
        from parlay import models
        from parlay.models.loading import read_config
        from parlay.system import threads

    threads.use(count)
    read_config(path)  # imports and makes once what a load would otherwise include
    before, size = _status("VmRSS"), path.stat().st_size
    load = _seconds(lambda: models.load(str(path), cache_tokens=256))
    peak = _status("VmHWM")
    again = _seconds(lambda: models.load(str(path), cache_tokens=256))
    read, read_new = _seconds(lambda: _read(path, bytearray(_CHUNK))), _seconds(lambda: _read_new(path, size))
    return {LOAD: load, AGAIN: again, READ: read, READ_NEW: read_new, "memory": peak - before, "size": size}


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes. Its result is dropped."""
    began = time.perf_counter()
    made = work()
    taken = time.perf_counter() - began
    del made
    return taken


def _read(path: Path, block: bytearray) -> None:
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def _read_new(path: Path, size: int) -> None:
    """Read the file into memory that is new to the process, in large pages like those of packed weights."""
    import torch

    from parlay.cache.pages import zeros

    into = zeros((size,), torch.uint8, torch.device("cpu")).numpy().data
    with path.open("rb", buffering=0) as file:
        while done := file.readinto(into):
            into = into[done:]


def _status(name: str) -> int:
    """Return a size in bytes that the kernel states: VmRSS is memory in use, VmHWM its peak so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


if __name__ == "__main__":
    print(json.dumps(_load(Path(sys.argv[1]), int(sys.argv[2]))))
