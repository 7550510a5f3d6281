"""Runs vLLM in its own environment: reads a number of prompts, decodes as many at once, and prints the seconds.

Its first argument is JSON: model, input and output tokens, vocabulary. It imports nothing of Parlay.
"""

from __future__ import annotations

import json
import random
import sys
import time


def main() -> None:
    """Read lines with a number and print lines of JSON. vLLM's own messages go to standard error."""
    from vllm import LLM, SamplingParams

    told = json.loads(sys.argv[1])
    longest = told["input"] + told["output"] + 8
    llm = LLM(told["model"], dtype="bfloat16", max_model_len=longest, max_num_seqs=64, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=told["output"], ignore_eos=True)
    print("ready", flush=True)
    for line in sys.stdin:
        draw = random.Random(int(line))
        ids = [[draw.randrange(5, told["vocabulary"]) for _ in range(told["input"])] for _ in range(int(line))]
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
