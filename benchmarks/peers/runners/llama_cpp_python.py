"""Runs llama.cpp through llama-cpp-python: plain, and with prompt lookup at the two settings that its manual names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.peers.protocol import Decode, Task, serve
from benchmarks.peers.runners.to_gguf import convert
from parlay.bench.stopwatch import Reading, Stopwatch

DRAFT_TOKENS = {"plain": 0, "prompt-lookup": 10, "prompt-lookup-2": 2}
"""Draft tokens of prompt lookup: 10 is its default, 2 what its manual advises on CPUs."""


class LlamaCppRunner:
    """Runs each mode in a context of its own; the file of weights is mapped into memory once."""

    def __init__(self, task: Task) -> None:
        self._task = task
        given = Path(task.model)
        self._path = given if given.suffix == ".gguf" else task.converted(task.model, "gguf")

    def load(self, mode: str) -> Decode:
        if not self._path.exists():
            convert(Path(self._task.model), self._path)
        drafted = DRAFT_TOKENS[mode]
        llama = Llama(
            str(self._path),
            n_ctx=self._task.longest + 32,  # drafts reach beyond the answer's end
            n_threads=self._task.threads,
            n_threads_batch=self._task.threads,
            logits_all=bool(drafted),  # otherwise it has room for the logits of 512 rows, and drafts need all rows
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=drafted) if drafted else None,
            verbose=False,
        )

        def decode(ids: Sequence[int], most: int) -> Reading:
            llama.reset()  # otherwise it reuses the cached tokens that the new prompt shares with the last one
            watch = Stopwatch()
            for token in itertools.islice(llama.generate(ids, temp=0.0), most):
                watch.emit([token])
            return watch.read(note=f"{self._task.precision}, cache fp16")

        return decode


if __name__ == "__main__":
    serve(LlamaCppRunner, "llama-cpp-python")
