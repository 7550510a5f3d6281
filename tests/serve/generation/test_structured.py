"""Answers of a given form and calls of tools, end to end through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"name": {"enum": ["Rome", "Paris"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strategy", ["none", "prompt-lookup", "draft-model"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_come_comes_and_keeps_to_its_schema(create: Any, choice: Any, strategy: str) -> None:
    tools = [WEATHER] if choice == "required" else [TIME, WEATHER]
    answer = create(tools=tools, tool_choice=choice, extra_body={"strategy": strategy})
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in {"Rome", "Paris"}
    assert arguments["days"] in range(1, 10)


def test_a_streamed_call_adds_up_to_the_whole_one_and_the_conversation_goes_on(
    create: Any, question: list[dict[str, str]]
) -> None:
    wanted = {"tools": [WEATHER, TIME], "tool_choice": "required"}
    message = create(**wanted).choices[0].message
    (call,) = message.tool_calls
    entries = [
        entry
        for chunk in create(**wanted, stream=True)
        for choice in chunk.choices
        for entry in choice.delta.tool_calls or ()
    ]
    assert entries[0].function.name == call.function.name
    assert "".join(entry.function.arguments for entry in entries) == call.function.arguments
    told = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = create(messages=[*question, message, told], tools=[WEATHER], max_tokens=8)
    assert answer.choices[0].finish_reason in {"length", "stop", "tool_calls"}


@pytest.mark.parametrize("seed", range(4))
def test_a_call_that_may_come_is_whole_or_there_is_none(create: Any, seed: int) -> None:
    answer = create(tools=[WEATHER, TIME], temperature=1.0, seed=seed, max_tokens=128)
    message = answer.choices[0].message
    for call in message.tool_calls or ():
        assert call.function.name in {"get_weather", "get_time"}
        assert answer.choices[0].finish_reason == "length" or json.loads(call.function.arguments) is not None
    assert message.tool_calls or not message.content.startswith("{") or answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("strategy", ["none", "prompt-lookup", "draft-model"])
@pytest.mark.parametrize("tools", [None, [TIME]])
def test_an_answer_keeps_to_a_json_schema(create: Any, strategy: str, tools: Any) -> None:
    fields = {"tools": tools} if tools else {}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = create(response_format=form, extra_body={"strategy": strategy}, **fields)
    if not answer.choices[0].message.tool_calls:
        assert json.loads(answer.choices[0].message.content)["city"] in {"Rome", "Paris"}
    assert isinstance(create(response_format={"type": "json_object"}, temperature=1, seed=1).id, str)


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "(ab|cd){2}"}, {"abab", "abcd", "cdab", "cdcd"}),
        ({"grammar": 'start: "x" "y"'}, {"xy"}),
    ],
)
def test_other_forms_are_kept_to(create: Any, form: dict[str, Any], texts: set[str]) -> None:
    assert create(extra_body={"structured_outputs": form}).choices[0].message.content in texts


@pytest.mark.parametrize("form", [{"json": {"type": "nonsense"}}, {"regex": "("}, {"grammar": "start: ("}])
def test_a_form_that_is_none_is_refused(create: Any, form: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(extra_body={"structured_outputs": form})
    assert "\n" not in refused.value.body["message"]


def test_tools_nested_deeper_than_anyone_reads_are_refused_by_name(refusal: Callable[..., Any]) -> None:
    def refused(depth: int) -> Any:
        parameters: dict[str, Any] = {"type": "object"}
        for _ in range(depth):
            parameters = {"type": "object", "properties": {"a": parameters}}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return refusal("chat/completions", messages=[{"role": "user", "content": "x"}], tools=[tool])

    assert refused(60)["param"] == "tools[0].function.parameters"
    assert "100 levels" in refused(60)["message"]
    assert "200 levels" in refused(300)["message"]  # so deep that nothing looks which field it is


@pytest.mark.parametrize("stream", [False, True])
def test_completions_keep_to_a_response_format(client: TestClient, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    body = {"prompt": "Weather: ", "max_tokens": 160, "temperature": 0, "response_format": form, "stream": stream}
    reply = client.post("/v1/completions", json=body)
    assert "parlay-ignored" not in reply.headers
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    told = chunks if stream else [reply.json()]
    text = "".join(choice["text"] for one in told for choice in one["choices"])
    assert json.loads(text)["city"] in {"Rome", "Paris"}
    plain = client.post("/v1/completions", json={"prompt": "x", "response_format": {"type": "text"}, "max_tokens": 1})
    assert plain.status_code == 200
    both = {"prompt": "x", "response_format": form, "structured_outputs": {"regex": "a"}}
    assert client.post("/v1/completions", json=both).json()["error"]["param"] == "structured_outputs"


LONG = {"type": "object", "properties": {"a": {"type": "string", "minLength": 200}}, "required": ["a"]}
LONG_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": LONG}}
HELLO = [{"role": "user", "content": "Hi"}]


NAMED = {"type": "json_schema", "name": "a", "schema": LONG}
TOLD = {"messages": HELLO, "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "where", "word"),
    [
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 4, "response_format": LONG_FORMAT},
            "finish_reason",
            "length",
        ),
        ("/v1/chat/completions", {**TOLD, "response_format": LONG_FORMAT}, "finish_reason", "length"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4, "text": {"format": NAMED}}, "status", "incomplete"),
        ("/v1/messages", {**TOLD, "output_config": {"format": NAMED}}, "stop_reason", "max_tokens"),
        ("/api/chat", {"messages": HELLO, "format": LONG, "options": {"num_predict": 4}}, "done_reason", "length"),
        ("/api/generate", {"prompt": "x", "format": LONG, "options": {"num_predict": 4}}, "done_reason", "length"),
    ],
)
def test_json_that_max_tokens_cuts_off_says_so(
    client: TestClient, path: str, body: dict[str, Any], where: str, word: str
) -> None:
    reply = client.post(path, json={**body, "stream": False}).json()
    found = reply["choices"][0] if "choices" in reply else reply
    assert found[where] == word


def test_white_space_that_a_form_leaves_free_can_be_ruled_out(client: TestClient) -> None:
    form = {"json": SCHEMA, "disable_any_whitespace": True}
    body = {"prompt": "Go:", "temperature": 1.5, "seed": 3, "max_tokens": 60, "structured_outputs": form}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert json.dumps(json.loads(choice["text"])) == choice["text"]
    refused = client.post("/v1/completions", json={**body, "structured_outputs": {**form, "json": None, "regex": "a"}})
    assert refused.status_code == 400
    assert "disable_any_whitespace" in refused.json()["error"]["message"]
