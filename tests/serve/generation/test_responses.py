"""The Responses API, with the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from parlay.serve.chat.answers import Arguments, Begin, Text, Thought
from parlay.serve.chat.request import ChatMessage
from parlay.serve.openai.responses.items import ItemWriter
from parlay.serve.openai.responses.response_store import ResponseStore, StoredResponse
from parlay.serve.openai.responses.to_request import joined
from parlay.serve.protocol.resume_comments import HEADER

Serve = Callable[[FastAPI], AbstractContextManager[str]]
LAMP: dict[str, Any] = {
    "type": "function",
    "name": "set_lamp",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASKED: dict[str, Any] = {"model": "parlay-mini", "input": "Say hello.", "temperature": 0, "max_output_tokens": 24}


class Answer(BaseModel):
    north: bool


@pytest.fixture(scope="module")
def client(make_app: Callable[..., FastAPI], serve: Serve) -> Iterator[openai.OpenAI]:
    with serve(make_app(responses_kept=3)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="parlay-mini",
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Say hello."}],
        temperature=0,
        max_tokens=24,
    )
    response = client.responses.create(**ASKED, instructions="Be kind.", metadata={"a": "b"})
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.metadata == {"a": "b"}
    incomplete = chat.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if incomplete else "completed")
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Say hello."}]}]
    again = client.responses.create(**{**ASKED, "input": parts}, instructions="Be kind.")
    assert again.output_text == response.output_text


def test_a_stream_adds_up_to_the_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED)
    with client.responses.stream(**ASKED) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage or last.response.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]


def test_a_call_that_must_come(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tools": [LAMP], "tool_choice": {"type": "function", "name": "set_lamp"}, "max_output_tokens": 64}
    (call,) = client.responses.create(**asked).output
    assert call.type == "function_call"
    assert isinstance(json.loads(call.arguments)["on"], bool)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == call.arguments == final.output[0].arguments  # type: ignore[union-attr]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [one.arguments for one in done] == [call.arguments]
    history = [
        {"role": "user", "content": "Lamp on."},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    assert client.responses.create(**{**ASKED, "input": history}).output_text


def test_an_answer_keeps_to_a_schema(client: openai.OpenAI) -> None:
    response = client.responses.parse(**{**ASKED, "max_output_tokens": 300}, text_format=Answer)
    assert isinstance(response.output_parsed, Answer)


def test_logprobs_of_the_text(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASKED, include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = response.output[0].content  # type: ignore[union-attr]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert response.usage is not None
    assert len(part.logprobs) >= response.usage.output_tokens - 1
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)


@pytest.mark.parametrize("stop", [None, ["zzzzzzzzzz qqqqqq"]], ids=["no stop", "a stop that holds text back"])
def test_a_stream_tells_the_logprobs_of_all_tokens(client: openai.OpenAI, stop: list[str] | None) -> None:
    """Also of tokens that come without text: halves of a character, and text that might begin a stop string."""
    bias = {str(token): 9 for token in (177, 258, 252, 229)}  # tokens of single bytes make halves of characters
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "extra_body": {"stop": stop, "logit_bias": bias}}
    (item,) = client.responses.create(**asked).output
    events = list(client.responses.create(**asked, stream=True))
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    told = [each.token for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    names = [each.token for each in item.content[0].logprobs]
    assert len(names) >= ASKED["max_output_tokens"]
    assert [each.token for each in done.logprobs] == names
    assert told == names[: len(told)]


def test_logprobs_wait_for_their_text_and_are_of_text_alone() -> None:
    writer, (half, whole, mark, last) = ItemWriter("resp_0"), [{"token": name} for name in ("half", "whole", "<", ".")]
    list(writer.take([], [half]))
    list(writer.take([Thought("x")], [half]))
    list(writer.take([], [half]))
    list(writer.take([Text("\u00e9")], [whole]))
    list(writer.take([], [mark]))
    list(writer.take([Begin(0, "f"), Arguments(0, "{}")], [mark]))
    list(writer.take([Text("ok")], [whole]))
    list(writer.take([], [last]))
    list(writer.finish("completed"))
    _, first, _, second = writer.items
    assert first["content"][0]["logprobs"] == [half, whole]
    assert second["content"][0]["logprobs"] == [whole, last]


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED)
    second = client.responses.create(**{**ASKED, "input": "And again."}, previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And again."},
    ]
    stateless = client.responses.create(**{**ASKED, "input": messages}, store=False)
    assert second.output_text == stateless.output_text
    assert second.usage.input_tokens == stateless.usage.input_tokens  # type: ignore[union-attr]
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert client.responses.input_items.list(second.id).data[0].content[0].text == "And again."  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stateless.id)
    client.responses.delete(second.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(**ASKED, previous_response_id=second.id)
    assert gone.value.code == "previous_response_not_found"


def test_tokens_of_a_request_are_counted_without_an_answer(client: openai.OpenAI) -> None:
    asked = {key: value for key, value in ASKED.items() if key in ("model", "input")}
    first = client.responses.create(**ASKED, instructions="Be kind.")
    assert first.usage is not None
    counted = client.responses.input_tokens.count(**asked, instructions="Be kind.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    later = client.responses.input_tokens.count(**asked, previous_response_id=first.id, tools=[LAMP])
    assert later.input_tokens > counted.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("input_tokens")


def test_the_oldest_responses_are_forgotten(client: openai.OpenAI) -> None:
    first, *_, last = [client.responses.create(**{**ASKED, "max_output_tokens": 1}) for _ in range(4)]
    assert client.responses.retrieve(last.id).id == last.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_are_the_key_s_own(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(keys=("one", "two")))
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    id = client.post("/v1/responses", json=ASKED, headers=mine).json()["id"]
    assert client.get(f"/v1/responses/{id}", headers=mine).status_code == 200
    assert client.get(f"/v1/responses/{id}", headers=other).status_code == 404
    assert client.delete(f"/v1/responses/{id}", headers=other).status_code == 404
    gone_on = client.post("/v1/responses", json={**ASKED, "previous_response_id": id}, headers=other)
    assert gone_on.status_code == 400


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"background": True}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"tools": [LAMP, {"type": "web_search"}]}, "tools[1]"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [LAMP]}, "tool_choice.name"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_output_tokens": 10**6, "min_tokens": 10**7}, "min_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_its_path(
    client: openai.OpenAI, fields: dict[str, Any], path: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASKED, extra_body=fields)
    assert refused.value.param == path


def test_fields_without_effect_are_named(client: openai.OpenAI) -> None:
    reasoning: Any = {"effort": "low", "summary": "auto"}
    included: Any = ["reasoning.encrypted_content"]
    create = client.responses.with_raw_response.create
    raw = create(**ASKED, include=included, prompt_cache_key="k", reasoning=reasoning)
    named = set(raw.headers["parlay-ignored"].split(", "))
    assert named == {"include[0]", "prompt_cache_key", "reasoning.summary", "reasoning.effort"}


def test_an_error_in_mid_stream_is_raised(make_app: Callable[..., FastAPI], serve: Serve) -> None:
    with serve(make_app(request_timeout=0.3)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        stream = client.responses.create(
            model="parlay-mini",
            input="Once",
            max_output_tokens=3000,
            stream=True,
            extra_body={"ignore_eos": True, "strategy": "none"},
        )
        with pytest.raises(openai.APIError, match=r"0\.3 seconds"):
            list(stream)


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    writer = ItemWriter("resp_1")
    deltas = [Thought("h"), Thought("m"), Text("Yes"), Begin(0, "f"), Arguments(0, "{"), Arguments(0, "}"), Text("so")]
    events = [event for delta in deltas for event in writer.take([delta])] + list(writer.finish("completed"))
    assert [item["type"] for item in writer.items] == ["reasoning", "message", "function_call", "message"]
    assert all(item["status"] == "completed" for item in writer.items)
    assert writer.items[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert writer.items[2]["arguments"] == "{}"
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert added == done == [0, 1, 2, 3]
    assert "response.reasoning_text.done" in {event["type"] for event in events}


def test_items_of_one_answer_are_one_message() -> None:
    said = [ChatMessage(role="assistant", content="", reasoning="hm"), ChatMessage(role="assistant", content="Yes")]
    assert joined(said) == [ChatMessage(role="assistant", content="Yes", reasoning="hm")]


def test_what_is_kept_is_bounded_in_bytes() -> None:
    kept = ResponseStore(100, most_bytes=3000)
    for number in range(10):
        kept.put("me", str(number), StoredResponse({"text": "x" * 900}, (), ()))
    assert [number for number in range(10) if kept.get("me", str(number))] == [7, 8, 9]
    kept.put("me", "large", StoredResponse({"text": "x" * 4000}, (), ()))
    assert kept.get("me", "large") is None


def test_what_is_kept_twice_under_one_id_counts_once() -> None:
    """A client chooses the id of a stream that it goes on with, and may choose it again."""
    kept = ResponseStore(100, most_bytes=3000, in_all=3000)
    for _ in range(10):
        kept.put("me", "same", StoredResponse({"text": "x" * 900}, (), ()))
    kept.put("other", "own", StoredResponse({"text": "x" * 900}, (), ()))
    assert kept.get("me", "same") is not None
    assert kept.get("other", "own") is not None


@pytest.mark.parametrize("arguments", ['{"on": tru}', '{"on": 1e999}'])
def test_a_call_that_is_no_json_is_answered_and_gone_on_with(
    make_app: Callable[..., FastAPI], engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    """Models err: the answer has what they wrote."""
    tokenizer = engine.llm.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(
        tokenizer, "chat_template", "{{ tools }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    written = f'<tool_call>{{"name": "set_lamp", "arguments": {arguments}}}</tool_call>'
    written_ids = tokenizer.encode(written, add_special_tokens=False)
    client = TestClient(make_app(), raise_server_exceptions=False)
    body = {**ASKED, "max_output_tokens": 64, "tools": [LAMP], "stream": True}
    fingerprint, name, created = client.post("/v1/responses", json={**body, "resume": {}}).headers[HEADER].split()
    begun = {"fingerprint": fingerprint, "id": name, "created": int(created), "token_ids": [written_ids]}
    told = client.post("/v1/responses", json={**body, "resume": begun})
    assert told.status_code == 200, told.text
    kept = client.get(f"/v1/responses/{name}")
    assert next(item["arguments"] for item in kept.json()["output"] if item["type"] == "function_call") == arguments
    again = {**ASKED, "input": "Go on.", "previous_response_id": name}
    assert client.post("/v1/responses", json=again).status_code == 200


def test_of_all_owners_the_one_that_keeps_most_loses_its_oldest() -> None:
    kept = ResponseStore(100, most_bytes=3000, in_all=3000)
    for owner, number in (("modest", 0), ("greedy", 0), ("greedy", 1), ("greedy", 2)):
        kept.put(owner, str(number), StoredResponse({"text": "x" * 900}, (), ()))
    assert [kept.get("greedy", str(number)) is not None for number in range(3)] == [False, True, True]
    assert kept.get("modest", "0") is not None


@pytest.mark.parametrize("path", ["/embeddings", "/score"])
def test_what_is_not_there_is_a_404_that_says_so(make_app: Callable[..., FastAPI], path: str) -> None:
    answer = TestClient(make_app()).post(path, json={"model": "parlay-mini", "input": "x"})
    assert answer.status_code == 404
    assert "send the request to /v1/" in answer.json()["error"]["message"]
