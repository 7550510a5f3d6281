"""Log-probabilities of the output's tokens, of the prompt's, and of the whole vocabulary."""

import math

from vllm import LLM, SamplingParams

llm = LLM(model="parlay-mini", dtype="float32")
prompt = "Once upon a time there was"
params = SamplingParams(temperature=0.9, seed=1, max_tokens=6, logprobs=3, prompt_logprobs=2)
(output,) = llm.generate(prompt, params)
completion = output.outputs[0]

total = 0.0
for token_id, told in zip(completion.token_ids, completion.logprobs, strict=True):
    chosen = told[token_id]
    assert 3 <= len(told) <= 4
    assert chosen.decoded_token == llm.get_tokenizer().decode([token_id])
    best = max(told.values(), key=lambda one: one.logprob)
    assert best.rank == 1
    assert (chosen.rank == 1) == (chosen.logprob == best.logprob)
    total += chosen.logprob
assert math.isclose(total, completion.cumulative_logprob, abs_tol=1e-4)

assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
assert output.prompt_logprobs[0] is None
for token_id, told in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
    assert told[token_id].logprob <= 0

(output,) = llm.generate(prompt, SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=0))
everything = output.outputs[0].logprobs[0]
assert math.isclose(sum(math.exp(one.logprob) for one in everything.values()), 1, abs_tol=1e-3)
assert all(len(told) == 1 for told in output.prompt_logprobs[1:])
