"""A model that reasons before it answers: forms hold for the answer alone, in every API."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from ollama import Client
from openai import OpenAI
from starlette.testclient import TestClient

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.models.config import DecoderConfig
from parlay.models.random_decoder import save_decoder
from parlay.serve.app import create_app
from parlay.testing.toy_tokenizers import byte_level
from parlay.text.reasoning import THINK
from parlay.types import StructuredOutputsParams

SPECIAL = ("<end>", THINK.begin, THINK.end)
MESSAGES = [{"role": "user", "content": "Rome or Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
TEMPLATE = (
    "{% for message in messages %}{{ message['content'].split('</think>')[-1] }}<end>{% endfor %}"
    "{% if add_generation_prompt and enable_thinking is not defined %}<think>\n"
    "{% elif add_generation_prompt and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""Begins the reasoning unless it is told otherwise; with ``enable_thinking`` true it leaves that to the model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with random weights whose tokenizer knows the marks of reasoning."""
    path = tmp_path_factory.mktemp("models") / "thinker"
    tokenizer = byte_level(["Rome or Paris?"], 300, SPECIAL)
    config = DecoderConfig(
        architecture="llama", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, max_context=1024,
    )  # fmt: skip
    save_decoder(config, path)
    tokenizer.eos_token = "<end>"
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(LLM(str(folder), dtype="float32"))
    yield engine
    asyncio.run(engine.close(0))


@pytest.fixture(scope="module")
def client(engine: AsyncLLM) -> TestClient:
    return TestClient(create_app({"thinker": engine}))


@pytest.fixture
def nudged(engine: AsyncLLM) -> dict[str, Any]:
    """Parameters under which random weights end their reasoning at some time, and do not begin another."""
    tokenizer = engine.llm.tokenizer
    assert tokenizer is not None
    begin, end = tokenizer.convert_tokens_to_ids([THINK.begin, THINK.end])
    return {"temperature": 1, "seed": 5, "logit_bias": {str(end): 1, str(begin): -20}}


@pytest.mark.parametrize("strategy", ["none", "prompt-lookup"])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_the_reasoning_is_free_and_the_answer_keeps_to_the_schema(
    client: TestClient, nudged: dict[str, Any], fields: dict[str, Any], strategy: str
) -> None:
    body = {"messages": MESSAGES, "strategy": strategy, **nudged, **fields}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert len(message["reasoning_content"]) > 1
    assert json.loads(message["content"])["city"] in {"Rome", "Paris"}


def test_a_call_that_must_come_comes_after_the_reasoning(client: TestClient, nudged: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", **nudged}
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in {"Rome", "Paris"}


@pytest.mark.parametrize("thinks", [True, False])
def test_without_reasoning_the_form_holds_from_the_first_token(
    client: TestClient, nudged: dict[str, Any], thinks: bool
) -> None:
    """``thinks``: it is left to the model, which is kept from it here."""
    body = {
        "messages": MESSAGES,
        "structured_outputs": {"choice": ["Rome", "Paris"]},
        "chat_template_kwargs": {"enable_thinking": thinks},
        **nudged,
    }
    message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message.get("reasoning_content") is None
    assert message["content"] in {"Rome", "Paris"}


def test_the_python_api_does_the_same(engine: AsyncLLM, nudged: dict[str, Any]) -> None:
    bias = {int(token): bias for token, bias in nudged["logit_bias"].items()}
    form = StructuredOutputsParams(choice=["Rome", "Paris"])
    params = SamplingParams(
        temperature=1, seed=5, logit_bias=bias, structured_outputs=form, skip_special_tokens=False, max_tokens=900
    )
    output = asyncio.run(engine.between_steps(lambda llm: llm.chat(MESSAGES, params)))
    thought, mark, answer = output[0].outputs[0].text.partition(THINK.end)
    assert (bool(thought), bool(mark)) == (True, True)
    assert answer in {"Rome", "Paris"}


def test_every_vendors_client_has_the_reasoning_apart(
    engine: AsyncLLM, serve: Callable[[FastAPI], AbstractContextManager[str]]
) -> None:
    """Random weights at temperature 0 reason to the end of their tokens."""
    asked: dict[str, Any] = {"model": "thinker", "messages": MESSAGES, "max_tokens": 24}
    greedy: dict[str, Any] = {"extra_body": {"temperature": 0}}
    with serve(create_app({"thinker": engine})) as url:
        chat = OpenAI(base_url=f"{url}/v1", api_key="any").chat.completions.create(**asked, **greedy)
        thought: str = chat.choices[0].message.reasoning_content  # type: ignore[attr-defined]
        from anthropic import Anthropic  # here, for it loads much

        claude = Anthropic(base_url=url, api_key="any")
        block = claude.messages.create(**asked, **greedy).content[0]
        with claude.messages.stream(**asked, **greedy) as stream:
            streamed = stream.get_final_message().content[0]
        assert (block.type, streamed.type) == ("thinking", "thinking")
        assert block.thinking == streamed.thinking == thought != ""
        llama, options = Client(host=url), {"temperature": 0, "num_predict": 24}
        assert llama.chat("thinker", MESSAGES, options=options).message.thinking == thought
        parts = list(llama.chat("thinker", MESSAGES, options=options, stream=True))
        assert "".join(part.message.thinking or "" for part in parts) == thought
        item = (
            OpenAI(base_url=f"{url}/v1", api_key="any")
            .responses.create(model="thinker", input="Rome or Paris?", max_output_tokens=24, temperature=0)
            .output[0]
        )
        assert item.type == "reasoning"
        assert item.content is not None
        assert item.content[0].text == thought


@pytest.mark.parametrize("lists", [True, False])
def test_marks_are_seen_and_ends_are_not_whether_or_not_the_tokenizer_lists_special_tokens(
    folder: Path, engine: AsyncLLM, tmp_path: Path, lists: bool
) -> None:
    """Most tokenizers mark special tokens, in tokenizer.json alone."""
    if not lists:
        other = Path(shutil.copytree(folder, tmp_path / "thinker"))
        plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
        (other / "tokenizer_config.json").write_text(json.dumps(plain))
        engine = AsyncLLM(LLM(str(other), dtype="float32"))
    tokenizer = engine.llm.tokenizer
    assert tokenizer is not None
    end, mark = (tokenizer.get_vocab()[text] for text in ("<end>", THINK.end))
    client = TestClient(create_app({"thinker": engine}))

    def answer(bias: dict[int, int], **more: Any) -> Any:
        return client.post(
            "/v1/chat/completions",
            json={"messages": MESSAGES, "temperature": 0, "max_tokens": 4, "logit_bias": bias, **more},
        ).json()

    silent = {"chat_template_kwargs": {"enable_thinking": False}}
    ended = answer({end: 100}, **silent)
    assert ended["choices"][0]["message"]["content"] == ""
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert answer({end: 100}, **silent, skip_special_tokens=False)["choices"][0]["message"]["content"] == "<end>"
    thought = answer({mark: 100})
    assert thought["choices"][0]["message"]["content"] == THINK.end * 3
    assert thought["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
    if not lists:
        asyncio.run(engine.close(0))


def test_steps_that_are_drafted_ahead_are_reasoning_and_answer_too(
    engine: AsyncLLM, folder: Path, nudged: dict[str, Any]
) -> None:
    other = AsyncLLM(LLM(str(folder), dtype="float32"))
    client = TestClient(create_app({"thinker": engine, "small": other}))
    ((mark, _), begin) = nudged["logit_bias"].items()
    body = {
        "model": "thinker",
        "messages": MESSAGES,
        "max_tokens": 40,
        **nudged,
        "logit_bias": dict([(mark, 3), begin]),
    }
    plain, ahead = (
        client.post("/v1/chat/completions", json={**body, **more}).json()["choices"][0]["message"]
        for more in ({}, {"reason_ahead": {"drafter": "small", "step_tokens": 8}})
    )
    assert plain["reasoning_content"]
    assert plain["content"]
    assert ahead == plain
    asyncio.run(other.close(0))


def test_no_message_tells_where_a_local_model_lies(client: TestClient, folder: Path) -> None:
    for strategy in ("layer-skip:attention=99", "layer-skip:mlp=99", "draft-model:model=/etc/passwd"):
        reply = client.post("/v1/chat/completions", json={"messages": MESSAGES, "strategy": strategy})
        assert reply.status_code == 400, strategy
        assert str(folder) not in reply.text
        assert str(folder.parent) not in reply.text
