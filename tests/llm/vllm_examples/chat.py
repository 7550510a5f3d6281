"""A conversation, several of them, and a template of one's own."""

from vllm import LLM

llm = LLM("parlay-mini", max_model_len=512, generation_config="vllm")
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 12
sampling_params.temperature = 0.5
sampling_params.seed = 3

conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": [{"type": "text", "text": "Write a story about "}, {"type": "text", "text": "a cat."}]},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
assert outputs[0].outputs[0].text

# A batch of conversations, with a bar.
conversations = [conversation for _ in range(4)]
outputs = llm.chat(messages=conversations, sampling_params=sampling_params, use_tqdm=True)
assert len({output.outputs[0].text for output in outputs}) == 1

# A chat template can be given.
template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}{{ ending }}"
outputs = llm.chat(conversation, sampling_params, chat_template=template, chat_template_kwargs={"ending": "[bot]"})
shown = llm.get_tokenizer().decode(outputs[0].prompt_token_ids)
assert "[user] Write a story about a cat.\n[bot]" in shown

# An answer that goes on where a message ends.
begun = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two three"}]
outputs = llm.chat(begun, sampling_params, add_generation_prompt=False, continue_final_message=True)
assert llm.get_tokenizer().decode(outputs[0].prompt_token_ids).endswith("one two three")
