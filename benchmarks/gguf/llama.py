"""Controls llama.cpp in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from parlay.bench.provenance import ROOT
from parlay.types import ParlayError

MODULE = "benchmarks.gguf.llama_worker"


class LlamaCpp:
    """Calls a `llama_worker` and waits for each answer. A call raises ParlayError if the answer is an error."""

    def __init__(self, asks: IO[str], replies: IO[str]) -> None:
        self._asks, self._replies = asks, replies
        self.version: str = self._answer()["version"]

    def open(self, path: Path, threads: int, *, cache: int = 1) -> None:
        """Open a model file and close the one open before. ``cache``: ggml's number of the type of cached keys and
        values."""
        self._call("open", path=str(path), threads=threads, cache=cache)

    def use(self, threads: int) -> None:
        """Use a number of threads from now on."""
        self._call("use", threads=threads)

    def read(self, ids: Sequence[int]) -> None:
        """Start a new text with these tokens."""
        self._call("read", ids=list(ids))

    def forward(self, ids: Sequence[int], start: int, *, every: bool) -> float:
        """Return the seconds of a forward of these tokens after the first ``start`` of the text.

        ``every`` asks for logits of every token instead of the last.
        """
        return float(self._call("forward", ids=list(ids), start=start, every=every))

    def logits(self, ids_TN: npt.NDArray[np.int64], rows: int, out: Path) -> npt.NDArray[np.float32]:
        """Return logits ``[T, N, V]`` of T texts of N tokens, computed ``rows`` tokens per call and passed through
        the file ``out``."""
        self._call("logits", ids=ids_TN.tolist(), rows=rows, out=str(out))
        found: npt.NDArray[np.float32] = np.load(out)
        out.unlink()
        return found

    def requantise(self, source: Path, made: Path, mix: str) -> None:
        """Write a GGUF file again as one of llama.cpp's types."""
        unfinished = made.with_suffix(".part")
        self._call("requantise", source=str(source), made=str(unfinished), mix=mix)
        unfinished.rename(made)

    def _call(self, what: str, **arguments: object) -> Any:
        self._asks.write(json.dumps({"do": what, **arguments}) + "\n")
        self._asks.flush()
        reply = self._answer()
        if "error" in reply:
            raise ParlayError(f"llama.cpp: {reply['error']}")
        return reply["result"]

    def _answer(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            raise ParlayError("llama.cpp's process has ended: does `import llama_cpp` work there?")
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def started(python: Path, log: Path) -> Iterator[LlamaCpp]:
    """Start a worker with the interpreter ``python``, and end it afterwards. Its standard error goes to the file
    ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": "src"}  # the worker imports only modules of Parlay that need no library
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            [str(python), "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        yield LlamaCpp(process.stdin, process.stdout)
        process.stdin.close()
