"""Several prompts together, and what comes back for each."""

from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(model="parlay-mini", tensor_parallel_size=1, dtype="float", seed=0)
outputs = llm.generate(prompts, sampling_params)

for prompt, output in zip(prompts, outputs, strict=True):
    assert output.prompt == prompt
    assert output.finished
    assert output.prompt_token_ids
    completion = output.outputs[0]
    assert completion.index == 0
    assert completion.finished()
    assert len(completion.token_ids) <= 16
    print(f"Prompt: {output.prompt!r}, Generated text: {completion.text!r} ({completion.finish_reason})")
