"""Runs vLLM's CPU build with an exported head, or without one. It reads a job as argument 1 and prints a JSON line.

    {"model": FOLDER, "method": "eagle3", "head": FOLDER, "nodes": 3, "most": 64, "prompts": [[ids], ..]}
    {"texts": [[ids], ..], "drafts": 116, "accepted": [49, 18, 5]}

``accepted`` counts the drafts that were right up to each depth.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CACHE_BYTES = 1 << 28


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    drafting = {"method": job["method"], "model": job["head"], "num_speculative_tokens": job["nodes"]}
    engine: Any = LLM(
        job["model"],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=CACHE_BYTES,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=drafting if job["method"] else None,
    )
    params = SamplingParams(temperature=0, max_tokens=job["most"], ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    counts = {metric.name: metric for metric in engine.get_metrics()}
    drafts = counts.get("vllm:spec_decode_num_drafts")
    depths = counts.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    found = {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": drafts.value if drafts else 0,
        "accepted": list(depths.values) if depths else [],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
