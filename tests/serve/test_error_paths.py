"""An error names the field that is to blame by its full path, as the client called it, in every API."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from parlay.serve.protocol.sampling_from_body import FieldNames, refused
from parlay.types import ParlayError

USER = {"role": "user", "content": "Hi"}
PART = {"type": "text", "text": "Hi"}
BAD: dict[str, Any] = {"type": "nonsense"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": BAD}}}
TOOL = {"type": "function", "function": FUNCTION}
GOOD = {"type": "function", "function": {"name": "g"}}
CHOICE = {"type": "function", "function": {"name": "none_such"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}

CHAT: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": 3}, "guided_regex"),
    ({"tools": [GOOD, TOOL], "tool_choice": {**CHOICE, "function": {"name": "f"}}}, "tools[1].function.parameters"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
    ({"tools": [GOOD, TOOL], "tool_choice": "required"}, "tools"),
    ({"functions": [FUNCTION], "function_call": {"name": "f"}}, "functions[0].parameters"),
    ({"functions": [FUNCTION], "function_call": {"name": "x"}}, "function_call.name"),
    ({"tools": [GOOD], "tool_choice": CHOICE}, "tool_choice.function.name"),
    ({"max_completion_tokens": 99}, "max_completion_tokens"),
    ({"max_tokens": 99}, "max_tokens"),
    ({"n_predict": 99}, "n_predict"),
    ({"options": {"num_predict": 99}}, "options.num_predict"),
    ({"options": {"temperature": -1}}, "options.temperature"),
    ({"options": {"seed": "x"}}, "options.seed"),
    ({"repeat_penalty": "x"}, "repeat_penalty"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [USER, {}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"prediction": {"type": "content", "content": 1}}, "prediction.content"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias.05"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"strategy": "no-such"}, "strategy"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"model": "none"}, "model"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ["x", 3]}, "prompt[1]"),
    ({"prompt": ["x", "word " * 5000]}, "prompt[1]"),
    ({"prompt": [[1], [1] * 5000]}, "prompt[1]"),
    ({"prompt": "word " * 5000}, "prompt"),
    ({"response_format": FORMAT}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "x"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"prompt": None}, "prompt"),
    ({"guided_grammar": "start: ("}, "guided_grammar"),
    ({"options": {"num_predict": 99}}, "options.num_predict"),
]
RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": BAD}}}, "text.format.schema"),
    ({"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}, "tools[0].parameters"),
    ({"max_output_tokens": 99}, "max_output_tokens"),
    ({"input": [USER, {"role": "user"}]}, "input[1].content"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    (
        {"tool_choice": {"type": "function", "name": "x"}, "tools": [{"type": "function", "name": "g"}]},
        "tool_choice.name",
    ),
]


@pytest.fixture(scope="module")
def limited(make_app: Any) -> TestClient:
    return TestClient(make_app(max_tokens=64))


@pytest.mark.parametrize(("fields", "path"), CHAT)
def test_of_chat(limited: TestClient, fields: dict[str, Any], path: str) -> None:
    _check(limited, "/v1/chat/completions", {"messages": [USER], **fields}, path)


@pytest.mark.parametrize(("fields", "path"), COMPLETIONS)
def test_of_completions(limited: TestClient, fields: dict[str, Any], path: str) -> None:
    _check(limited, "/v1/completions", {"prompt": "x", **fields}, path)


def test_null_is_named(limited: TestClient) -> None:
    reply = limited.post("/v1/completions", json={"prompt": None})
    assert reply.json()["error"]["message"] == "prompt must be a string or a list, got null"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("completions", {"prompt": "x", "stop": 5}, "stop must be a string or a list"),
        ("completions", {"prompt": "x", "stop": [5]}, "stop[0] must be a string"),
        ("chat/completions", {"messages": [{**USER, "content": 5}]}, "messages[0].content must be a string or a list"),
        (
            "chat/completions",
            {"messages": [{**USER, "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text must be a string",
        ),
        ("messages", {"messages": [USER], "max_tokens": 4, "system": 5}, "system must be a string or a list"),
        ("messages", {"messages": [USER], "max_tokens": 4, "system": PART}, "system must be a string or a list"),
        (
            "chat/completions",
            {"messages": [{**USER, "content": PART}]},
            "messages[0].content must be a string or a list",
        ),
        ("responses", {"input": 5}, "input must be a string or a list"),
    ],
)
def test_a_list_is_named_too(limited: TestClient, path: str, fields: dict[str, Any], message: str) -> None:
    assert limited.post(f"/v1/{path}", json=fields).json()["error"]["message"] == message


@pytest.mark.parametrize(("fields", "path"), RESPONSES)
def test_of_responses(limited: TestClient, fields: dict[str, Any], path: str) -> None:
    _check(limited, "/v1/responses", {"input": "Hi", **fields}, path)


@pytest.mark.parametrize(
    ("address", "body", "path"),
    [
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {"tokens": [1, "x"]}, "tokens[1]"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": [1, 99999]}, "tokens"),
    ],
)
def test_of_tokens(limited: TestClient, address: str, body: dict[str, Any], path: str) -> None:
    _check(limited, address, body, path)


def _check(client: TestClient, address: str, body: dict[str, Any], path: str) -> None:
    reply = client.post(address, json=body)
    error = reply.json()["error"]
    assert error["param"] == path, error
    assert reply.status_code in (400, 404)


MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"output_config": {"format": {"type": "json_schema", "schema": BAD}}}, "output_config.format.schema"),
    ({"output_format": {"type": "json_schema", "schema": BAD}}, "output_format.schema"),
    (
        {"tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"max_tokens": 99}, "max_tokens"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [USER, {}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"stop_sequences": [3]}, "stop_sequences[0]"),
]
OLLAMA: list[tuple[dict[str, Any], str]] = [
    ({"format": BAD}, "format"),
    ({"options": {"num_predict": 99}}, "options.num_predict"),
    ({"options": {"temperature": "x"}}, "options.temperature"),
    ({"options": {"mirostat": 2}}, "options.mirostat"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
]


@pytest.mark.parametrize(("fields", "path"), MESSAGES)
def test_of_messages(limited: TestClient, fields: dict[str, Any], path: str) -> None:
    """Anthropic's shape has no field for it, so the message tells."""
    reply = limited.post("/v1/messages", json={"messages": [USER], "max_tokens": 8, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(path), reply.text


@pytest.mark.parametrize(("fields", "path"), OLLAMA)
def test_of_ollama(limited: TestClient, fields: dict[str, Any], path: str) -> None:
    reply = limited.post("/api/chat", json={"messages": [USER], **fields})
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(path), reply.text


def test_the_field_is_the_one_that_an_error_declares_not_a_word_that_its_message_begins_with() -> None:
    """A message may begin with a field's name by chance, and name the field at fault later, or none."""
    names = FieldNames("messages", {"stop": "stop_sequences", "seed": "seed", "max_tokens": "max_tokens"})
    undeclared = refused(ValueError("seed corn is no model: choose another"), names)
    assert (undeclared.message, undeclared.param) == ("seed corn is no model: choose another", None)
    declared = refused(ParlayError("seed corn takes stop and no max_tokens: remove it", "stop"), names)
    assert declared.message == "seed corn takes stop_sequences and no max_tokens: remove it"
    assert declared.param == "stop_sequences"
