"""Speculative decoding as vLLM is asked for it."""

from vllm import LLM, SamplingParams

prompts = ["The future of AI is the future of AI is", "Say it again and again and again and"]
sampling_params = SamplingParams(temperature=0, max_tokens=24)

plain = LLM(model="parlay-mini", strategy="none").generate(prompts, sampling_params)
for config in (
    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    {"method": "suffix", "num_speculative_tokens": 8},
    {"method": "draft_model", "model": "parlay-mini-draft", "num_speculative_tokens": 5},
    {"model": "parlay-mini-draft", "num_speculative_tokens": 3},
):
    llm = LLM(model="parlay-mini", speculative_config=config)
    outputs = llm.generate(prompts, sampling_params)
    assert [out.outputs[0].token_ids for out in outputs] == [out.outputs[0].token_ids for out in plain]
    llm.close()
