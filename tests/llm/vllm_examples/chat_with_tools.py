"""Tools: described to the model, called, and answered."""

import json

from vllm import LLM, SamplingParams

llm = LLM(model="parlay-mini")
sampling_params = SamplingParams(
    max_tokens=64,
    temperature=0.0,
    structured_outputs={"regex": r'\[\{"name": "get_weather", "arguments": \{"city": "[a-z]{1,8}"\}\}\]'},
)

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
messages = [{"role": "user", "content": "What is the weather in Dallas?"}]
outputs = llm.chat(messages, sampling_params=sampling_params, tools=tools)
assert "get_weather" in llm.get_tokenizer().decode(outputs[0].prompt_token_ids)
answer = outputs[0].outputs[0].text.strip()

messages.append({"role": "assistant", "content": answer})
functions = {"get_weather": lambda city: f"It is sunny in {city}."}
results = [functions[call["name"]](**call["arguments"]) for call in json.loads(answer)]
messages.append({"role": "tool", "content": "\n\n".join(results), "tool_call_id": "call-1"})
outputs = llm.chat(messages, SamplingParams(max_tokens=8, temperature=0.0), tools=tools)
assert outputs[0].finished
