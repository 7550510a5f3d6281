"""Prompts that begin alike, with and without what is cached of them."""

from vllm import LLM, SamplingParams

prefix = "A table of names, ages and countries, one person in a row, in no order that anybody would know of. " * 3
prompts = [prefix + ending for ending in ("Question: who is John?", "Question: who is Zack?")]
sampling_params = SamplingParams(temperature=0.0, max_tokens=10)

llm = LLM(model="parlay-mini", enable_prefix_caching=True, gpu_memory_utilization=0.4, enforce_eager=True)
first = llm.generate(prompts[0], sampling_params)
second = llm.generate(prompts[1], sampling_params)
assert first[0].num_cached_tokens == 0
assert second[0].num_cached_tokens > 0
llm.reset_prefix_cache()
again = llm.generate(prompts, sampling_params)
assert [output.outputs[0].text for output in again] == [first[0].outputs[0].text, second[0].outputs[0].text]
