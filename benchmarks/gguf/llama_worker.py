"""llama.cpp as these benchmarks ask it. Runs in the environment of llama-cpp-python: a JSON line in, a JSON line out.

A line names what is to be done, one of `COMMANDS`, and its arguments; the answer is ``{"result": ..}`` or
``{"error": ..}``.
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
"""llama.cpp's numbers of the mixes that `requantise` makes."""
ROOM = 1024
"""Tokens of a context."""


class Llamas:
    """One open file at a time, with room for `ROOM` tokens."""

    def __init__(self) -> None:
        self._open: Llama | None = None

    @property
    def _llama(self) -> Llama:
        assert self._open is not None, "open a file first"
        return self._open

    def open(self, path: str, threads: int, cache: int = 1) -> None:
        """``cache``: ggml's number of the type of cached keys and values; 1 is float16, its default."""
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
        """Forget all, then read so many tokens."""
        self._decode(ids, 0, every=False)

    def forward(self, ids: Sequence[int], start: int, every: bool) -> float:
        """Seconds of one call with these tokens behind ``start`` others; logits of every one, or of the last."""
        return self._decode(ids, start, every)

    def logits(self, ids: Sequence[Sequence[int]], rows: int, out: str) -> None:
        """Logits of every token of some texts, ``rows`` tokens a call, float32 ``[texts, tokens, V]`` in the file."""
        found = []
        for text in ids:
            for start in range(0, len(text), rows):
                part = text[start : start + rows]
                self._decode(part, start, every=True)
                values = llama_cpp.llama_get_logits(self._llama.ctx)
                found.append(np.ctypeslib.as_array(values, (len(part), self._llama.n_vocab())).copy())
        np.save(out, np.concatenate(found).reshape(len(ids), len(ids[0]), -1))

    def requantise(self, source: str, made: str, mix: str) -> None:
        """For speed only: what was rounded once is rounded again."""
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
        llama_cpp.llama_get_logits(self._llama.ctx)  # waits until they are there
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
    """Answer until standard input ends."""
    llamas = Llamas()
    with replies() as out:
        write(out, {"version": metadata.version("llama-cpp-python")})
        for line in sys.stdin:
            asked: dict[str, Any] = json.loads(line)
            try:
                write(out, {"result": COMMANDS[asked.pop("do")](llamas, **asked)})
            except Exception as error:  # it goes on with what else it is asked
                write(out, {"error": one_line(error)})


if __name__ == "__main__":
    main()
