"""SmolLM2-135M-Instruct as `parlay pull smollm2-135m` brings it: real text, the same under every strategy."""

from __future__ import annotations

import pytest

from parlay import LLM, SamplingParams
from parlay.models.pulled import place_of

NAME = "smollm2-135m"
pytestmark = pytest.mark.skipif(not place_of(NAME).is_file(), reason=f"parlay pull {NAME} brings it")

QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]
RENAME = [
    {"role": "user", "content": "Rename the variable x to total:\n\nx = 0\nfor n in data:\n    x = x + n\nprint(x)"}
]
BLANK = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(NAME)


def test_the_file_brings_tokenizer_template_and_ends(llm: LLM) -> None:
    """Ids as llama.cpp has them for the same file."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    asked = "<|im_start|>user\nWhat is the opposite of hot?<|im_end|>\n<|im_start|>assistant\n"
    assert text == BLANK + asked
    assert tokenizer.encode("Hello, world 1984\n") == [19556, 28, 905, 216, 33, 41, 40, 36, 198]
    assert llm.runner.spec.eos_ids == (2,)
    assert tokenizer.decode([2]) == "<|im_end|>"


def test_it_answers_and_ends(llm: LLM) -> None:
    sample = llm.chat([QUESTION], SamplingParams(temperature=0, max_tokens=200))[0].outputs[0]
    assert "is cold" in sample.text
    assert sample.finish_reason == "stop"


@pytest.mark.parametrize("strategy", ["prompt-lookup", "suffix-decoding", "layer-skip", "lookahead"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_strategies_write_what_plain_decoding_writes(llm: LLM, strategy: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=7)
    plain, fast = (llm.chat([RENAME, QUESTION], params, strategy=name) for name in ("none", strategy))
    for one, other in zip(plain, fast, strict=True):
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
