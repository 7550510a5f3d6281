"""The likeliest continuations of a prompt."""

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model="parlay-mini")
params = BeamSearchParams(beam_width=5, max_tokens=10)
outputs = llm.beam_search([{"prompt": "Hello, my name is "}, {"prompt": "Once upon a time"}], params)

for output, prompt in zip(outputs, ("Hello, my name is ", "Once upon a time"), strict=True):
    assert len(output.sequences) == 5
    for sequence in output.sequences:
        assert sequence.text.startswith(prompt.strip())
        assert len(sequence.logprobs) <= 10
        assert sequence.cum_logprob < 0
    assert len({sequence.text for sequence in output.sequences}) == 5
