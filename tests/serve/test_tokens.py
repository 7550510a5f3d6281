"""``/tokenize`` and ``/detokenize`` say what the model would read."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from parlay.text.chat_template import ChatOptions

TEXTS = ["hello world", "", "  two  spaces\n", "caf\xe9 \u4f60\u597d \U0001f600", "<|user|>hi<|end|>", "\x00"]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_tokens_are_those_of_a_prompt(client: TestClient, engine: AsyncLLM, text: str) -> None:
    body = client.post("/tokenize", json={"model": "parlay-mini", "prompt": text}).json()
    assert body["tokens"] == list(engine.llm.job(text).samples[0].request.prompt)
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == engine.llm.engine.max_context


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(client: TestClient, text: str) -> None:
    tokens = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text, "content": text}


def test_a_conversation_is_tokenised_as_a_chat_completion_reads_it(client: TestClient, engine: AsyncLLM) -> None:
    tokens = client.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
    assert tokens == list(engine.llm.job(CHAT).samples[0].request.prompt)
    without = client.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()["tokens"]
    assert without == tokens[: len(without)] != tokens


def test_lm_eval_asks_the_server_for_its_tokenizer(client: TestClient, engine: AsyncLLM) -> None:
    """It takes the id of the token that ends a text from `/tokenize`, and cuts prompts to what the model holds."""
    told = client.get("/tokenizer_info", params={"model": "parlay-mini"}).json()
    asked = {"prompt": told["eos_token"], "add_special_tokens": False}
    tokenizer = engine.llm.get_tokenizer()
    assert client.post("/tokenize", json=asked).json()["tokens"] == [tokenizer.eos_token_id]
    assert told["chat_template"] == tokenizer.chat_template
    assert told["model_max_length"] == engine.llm.engine.max_context
    assert client.get("/tokenizer_info", params={"model": "no"}).status_code == 404


def test_a_whole_number_is_an_integer_however_it_is_written(client: TestClient) -> None:
    answers = [client.post("/detokenize", json={"tokens": tokens}) for tokens in ([300, 301], [300.0, 301.0])]
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize("token", [4096, 10**30, -1, 1.5, "3", None, True])
def test_an_id_that_is_none_is_refused(client: TestClient, token: object) -> None:
    response = client.post("/detokenize", json={"tokens": [1, token]})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


def test_a_text_of_many_tokens_is_told_in_full(client: TestClient) -> None:
    text = "one two three " * 20_000
    told = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert told["count"] == len(told["tokens"]) > 50_000
    assert client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": text, "content": text}


@pytest.mark.parametrize("parse_special", [False, True])
def test_messages_spell_control_tokens_only_if_the_operator_lets_them(
    make_app: Callable[..., FastAPI], engine: AsyncLLM, parse_special: bool
) -> None:
    client, messages = TestClient(make_app(parse_special=parse_special)), [{"role": "user", "content": "a <|end|> b"}]
    read = engine.llm.job(messages, chat=ChatOptions(parse_special=parse_special)).samples[0].request.prompt
    assert client.post("/tokenize", json={"messages": messages}).json()["tokens"] == list(read)
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(read)
    safe = engine.llm.job(messages).samples[0].request.prompt
    assert (read == safe) is not parse_special


def test_pieces_of_a_text_of_many_tokens_take_no_more_memory_than_their_json(client: TestClient) -> None:
    text = "one two three " * 10_000
    tracemalloc.start()
    answer = client.post("/tokenize", json={"content": text, "with_pieces": True})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    told = answer.json()["tokens"]
    assert "".join(piece["piece"] for piece in told) == text
    assert len(told) > 25_000
    assert peak < 8 * len(answer.content)  # objects of all would take twelve times as much
