"""Ollama's API as its own client sees it, and by the shapes on the wire."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import ollama
import pytest
from fastapi import FastAPI
from ollama import Client
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from parlay.serve.app import create_app, shut_down
from parlay.serve.ollama.body import seconds

PROMPT = "Repeat this line: the ferry leaves at ten past seven."
SAID = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "num_predict": 16}
MINI: dict[str, Any] = {"model": "parlay-mini", "options": GREEDY}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "description": "Switch a lamp.",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}


@pytest.fixture(scope="module")
def llama(
    make_app: Callable[..., FastAPI], serve: Callable[[FastAPI], AbstractContextManager[str]]
) -> Iterator[Client]:
    with serve(make_app()) as url:
        yield Client(host=url)


def test_a_chat_has_the_text_of_a_chat_completion(llama: Client, client: TestClient) -> None:
    reply = llama.chat(messages=SAID, **MINI)
    body = {"messages": SAID, "max_tokens": 16, "temperature": 0}
    assert (
        reply.message.content
        == client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    )
    assert (reply.done, reply.message.role) == (True, "assistant")
    assert reply.done_reason in ("stop", "length")
    assert 0 < reply.eval_count <= 16
    assert reply.prompt_eval_count > 0
    assert 0 < reply.eval_duration <= reply.total_duration


def test_a_stream_is_a_line_for_each_step_and_has_the_same_text(llama: Client) -> None:
    whole = llama.chat(messages=SAID, **MINI).message.content
    parts = list(llama.chat(messages=SAID, stream=True, **MINI))
    assert "".join(part.message.content for part in parts) == whole
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate_answers_a_prompt_with_its_template_or_without(llama: Client) -> None:
    templated = llama.generate(prompt=PROMPT, **MINI)
    assert templated.response == llama.chat(messages=SAID, **MINI).message.content
    raw = llama.generate(prompt=PROMPT, raw=True, **MINI)
    assert raw.prompt_eval_count < templated.prompt_eval_count
    assert "".join(part.response for part in llama.generate(prompt=PROMPT, stream=True, **MINI)) == templated.response
    assert llama.generate(prompt=PROMPT, system="Be brief.", **MINI).prompt_eval_count > templated.prompt_eval_count


def test_format_holds_the_answer_to_json_or_a_schema(llama: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"north": {"type": "boolean"}},
        "required": ["north"],
        "additionalProperties": False,
    }
    options = {"temperature": 0, "num_predict": 64}
    told = json.loads(llama.chat("parlay-mini", SAID, format=schema, options=options).message.content)
    assert isinstance(told["north"], bool)
    assert llama.generate("parlay-mini", PROMPT, format="json", options=options).response.lstrip().startswith("{")


def test_tools_and_what_they_answered_go_to_the_model(llama: Client) -> None:
    call = {"function": {"name": "set_lamp", "arguments": {"on": True}}}
    messages = [
        {"role": "user", "content": "Switch the lamp on."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_name": "set_lamp"},
    ]
    reply = llama.chat(messages=messages, tools=[TOOL], **MINI)
    assert reply.prompt_eval_count > llama.chat(messages=messages[:1], **MINI).prompt_eval_count
    for called in llama.chat(messages=messages[:1], tools=[TOOL], **MINI).message.tool_calls or ():
        assert called.function.name == "set_lamp"
        assert isinstance(called.function.arguments, dict)


def test_options_are_heeded(llama: Client) -> None:
    whole = llama.chat(messages=SAID, **MINI).message.content
    stop = whole[3:6]
    assert (
        llama.chat("parlay-mini", SAID, options={**GREEDY, "stop": [stop]}).message.content
        == whole[: whole.index(stop)]
    )
    drawn = [llama.chat("parlay-mini", SAID, options={"seed": 7, "num_predict": 8}).message.content for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert llama.chat("parlay-mini", SAID, options={**GREEDY, "num_ctx": 4096, "num_gpu": 0}).message.content == whole


def test_log_probabilities_come_with_the_text(llama: Client) -> None:
    few: dict[str, Any] = {"model": "parlay-mini", "options": {"temperature": 0, "num_predict": 4}}
    reply = llama.chat(messages=SAID, logprobs=True, top_logprobs=2, **few)
    told = reply.logprobs or []
    assert "".join(one.token for one in told) == reply.message.content
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob >= one.logprob for one in told)
    parts = list(llama.generate(prompt=PROMPT, logprobs=True, stream=True, **few))
    assert "".join(one.token for part in parts for one in part.logprobs or ()) == "".join(one.response for one in parts)


def test_models_are_listed_shown_and_told_of_when_loaded(llama: Client) -> None:
    assert [model.model for model in llama.list().models] == ["parlay-mini:latest"]
    assert [model.model for model in llama.ps().models] == ["parlay-mini:latest"]
    assert "completion" in (llama.show("parlay-mini").capabilities or [])
    assert llama.chat(**{**MINI, "model": "parlay-mini:latest"}, messages=SAID).message.content


def test_an_empty_request_loads_the_model(llama: Client) -> None:
    assert llama.generate("parlay-mini", "").done_reason == "load"
    assert llama.chat("parlay-mini", []).done_reason == "load"


def test_errors_are_ollamas(llama: Client) -> None:
    with pytest.raises(ollama.ResponseError, match="no model 'nobody'") as error:
        llama.chat("nobody", SAID)
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat"):
        llama.chat("parlay-mini", SAID, options={"mirostat": 2})
    asked = {"model": "parlay-mini", "messages": SAID, "reason_ahead": {}}
    with pytest.raises(ollama.ResponseError, match="reason_ahead is for /v1/chat/completions or /v1/responses"):
        llama._request(ollama.ChatResponse, "POST", "/api/chat", json=asked)
    with pytest.raises(ollama.ResponseError, match="images"):
        llama.chat("parlay-mini", [{"role": "user", "content": "x", "images": [b"x"]}])


def test_nothing_is_pulled_unless_the_owner_allows_it(llama: Client) -> None:
    with pytest.raises(ollama.ResponseError, match="--allow-pull") as error:
        llama.pull("smollm2-135m")
    assert error.value.status_code == 403


def test_how_much_of_a_text_a_shift_would_keep_has_no_effect_as_nothing_is_shifted(client: TestClient) -> None:
    body = {"prompt": "Hi", "stream": False, "options": {"num_keep": 24, "num_predict": 1}}
    told = client.post("/api/generate", json=body)
    assert (told.status_code, told.headers["parlay-ignored"]) == (200, "options.num_keep")
    told = client.post("/completion", json={"prompt": "Hi", "n_predict": 1, "n_keep": 24})
    assert (told.status_code, told.headers["parlay-ignored"]) == (200, "n_keep")


def test_a_model_that_is_served_counts_as_pulled(llama: Client) -> None:
    for name in ("parlay-mini", "parlay-mini:latest"):
        assert llama.pull(name).status == "success"
        assert [step.status for step in llama.pull(name, stream=True)] == ["success"]


def test_what_is_pulled_is_told_of_and_served(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def bring(name: str, progress: Callable[[int, int], object]) -> None:
        if name != "new":
            raise ValueError("/srv/secret is not a model to pull")
        progress(50, 100)
        progress(100, 100)

    monkeypatch.setattr("parlay.serve.registry.bring", bring)
    with TestClient(create_app({"mini": engine}, pulled=lambda name: lambda: engine)) as client:
        told = [json.loads(line) for line in client.post("/api/pull", json={"model": "new"}).text.splitlines()]
        assert told[0] == {"status": "pulling manifest"}
        assert {"total": 100, "completed": 100}.items() <= told[-2].items()
        assert told[-1] == {"status": "success"}
        assert [model["name"] for model in client.get("/api/tags").json()["models"]] == ["mini:latest", "new:latest"]
        (_, failed) = client.post("/api/pull", json={"model": "other"}).text.splitlines()
        assert "can't be pulled" in json.loads(failed)["error"]
        assert "secret" not in failed


def test_a_pull_does_not_keep_the_server_from_ending(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def bring(name: str, progress: Callable[[int, int], object]) -> None:
        begun.set()
        assert go_on.wait(600)

    monkeypatch.setattr("parlay.serve.registry.bring", bring)
    app = create_app({"mini": engine}, pulled=lambda name: lambda: engine)

    async def closed() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            asked = asyncio.create_task(client.post("/api/pull", json={"model": "new"}))
            while not begun.is_set():
                await asyncio.sleep(0.01)
            await shut_down(app)
            return await asked

    assert json.loads(asyncio.run(closed()).text.splitlines()[-1]) == {
        "error": "this server is shutting down: try again"
    }
    go_on.set()


@pytest.mark.parametrize(("text", "value"), [("5m", 300), ("1h30m", 5400), ("90", 90), (0, 0), ("1.5s", 1.5)])
def test_times_are_read_as_ollama_reads_them(text: float | str, value: float) -> None:
    assert seconds(text) == value
    assert seconds(-1) == seconds("-1s") == float("inf")


def test_texts_are_embedded_as_for_the_client_of_openai(llama: Client, client: TestClient) -> None:
    texts = ["The fox jumps.", "A dog sleeps."]
    reply = llama.embed(model="parlay-mini", input=texts)
    other = client.post("/v1/embeddings", json={"input": texts}).json()
    assert [list(each) for each in reply.embeddings] == [each["embedding"] for each in other["data"]]
    assert reply.prompt_eval_count == other["usage"]["prompt_tokens"]
    assert len(llama.embed(model="parlay-mini:latest", input=texts[0]).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="dimensions is not supported"):
        llama.embed(model="parlay-mini", input="x", dimensions=8)


def test_the_older_form_of_embeddings_is_not_scaled_to_length_1(llama: Client, client: TestClient) -> None:
    reply = llama.embeddings("parlay-mini", "The fox jumps.", keep_alive="5m")
    other = client.post("/v1/embeddings", json={"input": "The fox jumps.", "normalize": False}).json()
    assert list(reply.embedding) == other["data"][0]["embedding"]
    assert list(llama.embeddings("parlay-mini", "").embedding) == []
    with pytest.raises(ollama.ResponseError, match="no model 'nobody'"):
        llama.embeddings("nobody", "x")
