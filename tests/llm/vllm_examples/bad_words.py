"""Says what a text must contain and must not contain."""

from vllm import LLM, SamplingParams

llm = LLM(model="parlay-mini", dtype="half")
prompt = "The weather was"
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
text = llm.generate(prompt, greedy)[0].outputs[0].text
word = next(word for word in text.split() if word.isalpha())

greedy.bad_words = [word]
assert word not in llm.generate(prompt, greedy)[0].outputs[0].text.split()

greedy.bad_words = None
greedy.stop_token_ids = None
greedy.stop = [text[4:6]]
assert llm.generate(prompt, greedy)[0].outputs[0].text == text.split(text[4:6])[0]
