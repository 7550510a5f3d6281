"""Prompts as texts, token ids and dicts, one or many, with parameters of their own."""

from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt

llm = LLM("parlay-mini")
tokenizer = llm.get_tokenizer()
text = "Once upon a time"
ids = tokenizer.encode(text)
greedy = SamplingParams(temperature=0.0, max_tokens=8)

forms = [
    llm.generate(text, greedy),
    llm.generate([text], greedy, use_tqdm=False),
    llm.generate({"prompt": text}, greedy),
    llm.generate(TextPrompt(prompt=text), greedy),
    llm.generate({"prompt_token_ids": ids}, greedy),
    llm.generate([TokensPrompt(prompt_token_ids=ids)], greedy),
    llm.generate(ids, greedy),
    llm.generate([ids], greedy),
]
assert len({output.outputs[0].text for (output,) in forms}) == 1
assert forms[0][0].outputs[0].text == tokenizer.decode(forms[0][0].outputs[0].token_ids)

per_prompt = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, n=2, seed=1)]
one, two = llm.generate([text, text], per_prompt)
assert len(one.outputs) == 1
assert [len(sample.token_ids) for sample in two.outputs] == [2, 2]
