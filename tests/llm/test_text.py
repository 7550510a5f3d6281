"""Where the text of an answer begins: after the prompt's, or, in a chat, as a text of its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient
from transformers import PreTrainedTokenizerFast

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.serve.app import create_app
from parlay.testing.toy_tokenizers import sentence_pieces

MESSAGES = [{"role": "user", "content": "one"}]
FACE = [f"<0x{byte:02X}>" for byte in "🙂".encode()]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """It leaves out the space of a text's very first word."""
    tokenizer = sentence_pieces(["▁", "▁one", "▁two", "▁three"])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module")
def llm(tokenizer: PreTrainedTokenizerFast) -> Iterator[LLM]:
    with LLM("parlay-mini", tokenizer=tokenizer, seed=1) as model:
        yield model


def only(tokenizer: PreTrainedTokenizerFast, piece: str, tokens: int = 2) -> SamplingParams:
    """Sampling that writes nothing else."""
    return SamplingParams(max_tokens=tokens, allowed_token_ids=[tokenizer.convert_tokens_to_ids(piece)])


def test_a_text_goes_on_from_its_prompt(llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    params = only(tokenizer, "▁two")
    for prompt in ("one", {"prompt_token_ids": tokenizer.encode("one one")}):
        for strategy in ("none", "prompt-lookup"):
            assert llm.generate(prompt, params, strategy=strategy)[0].outputs[0].text == " two two"
    assert "".join(event.text for event in llm.stream("one", params)) == " two two"


def test_an_answer_in_a_chat_is_a_text_of_its_own_unless_it_goes_on_with_a_message(
    llm: LLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    params = only(tokenizer, "▁two")
    assert llm.chat(MESSAGES, params)[0].outputs[0].text == "two two"
    begun = [*MESSAGES, {"role": "assistant", "content": "three"}]
    (output,) = llm.chat(begun, params, add_generation_prompt=False, continue_final_message=True)
    assert output.outputs[0].text == " two two"


def test_a_character_may_begin_in_the_prompt(llm: LLM, tokenizer: PreTrainedTokenizerFast) -> None:
    *begun, last = FACE
    ids = [*tokenizer.encode("one"), *tokenizer.convert_tokens_to_ids(begun)]
    (output,) = llm.generate({"prompt_token_ids": ids}, only(tokenizer, last, 1))
    assert output.outputs[0].text == "🙂"


@pytest.mark.parametrize(("end", "written"), [(FACE[:2], "▁two"), (FACE[:3], FACE[0])])
def test_what_is_broken_in_the_prompt_is_not_in_the_text(
    llm: LLM, tokenizer: PreTrainedTokenizerFast, end: list[str], written: str
) -> None:
    ids = [*tokenizer.encode("one"), *tokenizer.convert_tokens_to_ids(end)]
    (output,) = llm.generate({"prompt_token_ids": ids}, only(tokenizer, written))
    assert output.outputs[0].text == {"▁two": " two two", FACE[0]: ""}[written]


def test_offsets_of_tokens_are_those_of_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    two = tokenizer.convert_tokens_to_ids("▁two")
    engine = AsyncLLM(LLM("parlay-mini", tokenizer=tokenizer))
    client = TestClient(create_app({"mini": engine}))
    asked = {"prompt": "one three", "max_tokens": 3, "allowed_token_ids": [two], "logprobs": 0}
    choice = client.post("/v1/completions", json={**asked, "echo": True}).json()["choices"][0]
    assert choice["text"] == "one three two two two"
    assert choice["logprobs"]["text_offset"][-3:] == [9, 13, 17]
    streamed = client.post("/v1/completions", json={**asked, "stream": True}).text
    places = [int(place) for found in re.findall(r'"text_offset":\[([\d,]*)\]', streamed) for place in found.split(",")]
    assert places == [0, 4, 8]
    asyncio.run(engine.close(0))
