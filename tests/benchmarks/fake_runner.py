"""A fake of a benchmark's runner process, started by `test_peers`. Its modes behave as real runners may."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from benchmarks.peers.protocol import Decode, Task, serve
from parlay.bench.stopwatch import Reading


class FakeRunner:
    """Continues a prompt with the numbers after its last one."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def load(self, mode: str) -> Decode:
        print("a library greets")
        os.write(1, b"and so does one in C\n")
        if mode == "unknown":
            raise ValueError("no such mode\nsecond line")

        def decode(ids: Sequence[int], most: int) -> Reading:
            if mode == "dies":
                os.write(2, b"out of memory\n")
                os._exit(3)
            if mode == "hangs":
                time.sleep(60)
            return Reading(
                tuple(ids[-1] + 1 + at for at in range(most)), 1, 0.1, 0.3, steps=most, note=self._task.model
            )

        return decode


if __name__ == "__main__":
    serve(FakeRunner, "parlay")
