"""Runs llama.cpp for these benchmarks in the environment of llama-cpp-python: it reads and writes lines of JSON.

A line read holds a name of `COMMANDS` and its arguments. A line written is ``{"result": ..}`` or ``{"error": ..}``.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama

from benchmarks.peers.protocol import one_line, replies, write

TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18}
"""llama.cpp's numbers of the file types that `requantise` makes."""
ROOM = 1024
"""The context's size in tokens."""


class Llamas:
    """Holds one open model file at a time, with room for `ROOM` tokens."""

    def __init__(self) -> None:
        self._open: Llama | None = None

    @property
    def _llama(self) -> Llama:
        assert self._open is not None, "open a file first"
        return self._open

    def open(self, path: str, threads: int, cache: int = 1) -> None:
        """Open a file. ``cache``: ggml's number of the type of cached keys and values; 1 is float16, its default."""
        if self._open is not None:
            self._open.close()
        self._open = Llama(
            path,
            n_ctx=ROOM,
            n_batch=512,
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,
            type_k=cache,
            type_v=cache,
            verbose=False,
        )

    def use(self, threads: int) -> None:
        self._llama._ctx.set_n_threads(threads, threads)

    def read(self, ids: Sequence[int]) -> None:
        """Clear the cache, then read these tokens."""
        self._decode(ids, 0, every=False)

    def forward(self, ids: Sequence[int], start: int, every: bool) -> float:
        """Return the seconds of one call with these tokens after ``start`` others; ``every`` asks for logits of each
        token."""
        return self._decode(ids, start, every)

    def logits(self, ids: Sequence[Sequence[int]], rows: int, out: str) -> None:
        """Write the logits of texts to a file, computed ``rows`` tokens per call: float32 ``[texts, tokens, V]``."""
        found = []
        for text in ids:
            for start in range(0, len(text), rows):
                part = text[start : start + rows]
                self._decode(part, start, every=True)
                values = llama_cpp.llama_get_logits(self._llama.ctx)
                found.append(np.ctypeslib.as_array(values, (len(part), self._llama.n_vocab())).copy())
        np.save(out, np.concatenate(found).reshape(len(ids), len(ids[0]), -1))

    def requantise(self, source: str, made: str, mix: str) -> None:
        """Write a file again as another type. Rounded weights are rounded again, so only the speed of the result
        counts."""
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = TYPES[mix], True
        if llama_cpp.llama_model_quantize(source.encode(), made.encode(), ctypes.byref(params)):
            raise RuntimeError(f"{Path(source).name} can't be stored as {mix}")

    def _decode(self, ids: Sequence[int], start: int, every: bool) -> float:
        context, batch = self._llama._ctx, self._llama._batch
        context.kv_cache_seq_rm(-1, start, -1)
        batch.set_batch(batch=list(ids), n_past=start, logits_all=every)
        began = time.perf_counter()
        context.decode(batch)
        llama_cpp.llama_get_logits(self._llama.ctx)  # waits until the logits are computed
        return time.perf_counter() - began


COMMANDS: dict[str, Callable[..., Any]] = {
    "open": Llamas.open,
    "use": Llamas.use,
    "read": Llamas.read,
    "forward": Llamas.forward,
    "logits": Llamas.logits,
    "requantise": Llamas.requantise,
}


def main() -> None:
    """Answer lines until standard input ends."""
    llamas = Llamas()
    with replies() as out:
        write(out, {"version": metadata.version("llama-cpp-python")})
        for line in sys.stdin:
            asked: dict[str, Any] = json.loads(line)
            try:
                write(out, {"result": COMMANDS[asked.pop("do")](llamas, **asked)})
            except Exception as error:  # the worker goes on with the next line
                write(out, {"error": one_line(error)})


if __name__ == "__main__":
    main()
