"""Runs vLLM's CPU build with one way of drafting. It reads a job as argument 1, then a line for each batch of prompts.

    {"model": FOLDER, "dtype": "float32", "longest": 2048, "together": 11, "speculative": {..}, "additional": {..},
     "clock": "wall"}
    {"prompts": [[ids], ..], "most": 96}
    {"texts": [[ids], ..], "seconds": 3.1, "wall": 3.1, "drafted": 210, "accepted": 120}

With the clock "cpu", seconds are CPU time of the main thread, which does all arithmetic if there is one thread. They
hardly depend on what else runs. The time of other threads, such as those of vLLM's n-grams, is not included.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.peers.protocol import replies, write
from parlay.vllm import Proposer

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
CACHE_BYTES = 1 << 29
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


class CpuTimedProposer(Proposer):
    """A proposer that measures the cost of steps as CPU time."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config, time.thread_time)


def main() -> None:
    """Run one engine until standard input ends."""
    job = json.loads(sys.argv[1])
    clock = CLOCKS[job["clock"]]
    with replies() as out:
        from vllm import LLM, SamplingParams

        engine: Any = LLM(
            job["model"],
            dtype=job["dtype"],
            max_model_len=job["longest"],
            max_num_seqs=job["together"],
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=CACHE_BYTES,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=job["speculative"],
            additional_config=job["additional"],
        )
        write(out, {"ready": True})
        for line in sys.stdin:
            asked = json.loads(line)
            params = SamplingParams(temperature=0, max_tokens=asked["most"], ignore_eos=True, detokenize=False)
            before = counts(engine)
            began, wall = clock(), time.perf_counter()
            outputs = engine.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], params, use_tqdm=False)
            seconds, wall = clock() - began, time.perf_counter() - wall
            after = counts(engine)
            texts = [list(output.outputs[0].token_ids) for output in outputs]
            drafted, accepted = (after[name] - before[name] for name in (DRAFTED, ACCEPTED))
            counted = {"drafted": drafted, "accepted": accepted}
            write(out, {"texts": texts, "seconds": seconds, "wall": wall, **counted})


def counts(engine: Any) -> dict[str, int]:
    """Return the drafted and accepted tokens since the start; 0 if nothing drafts."""
    values = {metric.name: metric.value for metric in engine.get_metrics() if metric.name in (DRAFTED, ACCEPTED)}
    return {name: values.get(name, 0) for name in (DRAFTED, ACCEPTED)}


if __name__ == "__main__":
    main()
