"""How much a body may hold, and that nothing reads more: what is read at once holds up all other requests."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from parlay import RequestOutput, SamplingParams
from parlay.aio import AsyncLLM
from parlay.serve.anthropic.reply import MessageShape, message_reply
from parlay.serve.chat.answers import AnswerShape
from parlay.serve.chat.calls import FORMATS, PLAIN, Arguments
from parlay.serve.field_spelling import MOST_FIELDS
from parlay.serve.middleware import MOST_CONTAINERS, MOST_STRINGS, MOST_VALUES, check_readable
from parlay.serve.ollama.reply import OllamaShape, ollama_reply
from parlay.serve.protocol.answering import read_json
from parlay.serve.protocol.body import MOST_BIASES
from parlay.serve.protocol.logprobs import Speller

JSON = {"Content-Type": "application/json"}


def many(unit: bytes, count: int) -> bytes:
    return b'{"x": [' + b",".join([unit] * count) + b"]}"


@pytest.mark.parametrize(
    ("unit", "most", "what"),
    [(b"{}", MOST_CONTAINERS, "lists and objects"), (b'"\\""', MOST_STRINGS, "strings"), (b"7", MOST_VALUES, "values")],
)
def test_a_body_of_too_many_things_is_refused_before_it_is_read(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, unit: bytes, most: int, what: str
) -> None:
    check_readable(many(unit, most - 10))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("parlay.serve.protocol.answering.from_json", refuse)
    for path in ("/v1/completions", "/v1/messages", "/v1/responses", "/api/chat", "/tokenize"):
        reply = client.post(path, content=many(unit, most + 1), headers=JSON)
        assert reply.status_code == 400
        assert what in reply.text
        assert f"the limit is {most}" in reply.text


def test_text_is_no_number_of_strings() -> None:
    check_readable(json.dumps({"prompt": '"quoted" ' * MOST_STRINGS}).encode())


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("logit_bias", {f"k{place}": 1 for place in range(MOST_BIASES + 1)}, f"the limit is {MOST_BIASES}"),
        ("options", {f"k{place}": 1 for place in range(MOST_FIELDS + 1)}, f"more than {MOST_FIELDS}"),
        ("allowed_token_ids", [1] * 200_000 + [-1], "must be at least 0"),
        ("structured_outputs", {"json": {"x": [0] * 100_001}}, "100000 values"),
    ],
)
def test_a_field_of_too_many_things_is_refused_by_its_name(
    client: TestClient, field: str, value: Any, told: str
) -> None:
    reply = client.post("/v1/completions", json={"prompt": "x", field: value})
    assert reply.status_code == 400
    assert field in reply.json()["error"]["param"]
    assert told in reply.text


def test_free_json_holds_no_number_without_end(client: TestClient) -> None:
    body = b'{"prompt": "x", "structured_outputs": {"json": {"const": [1e999]}}}'
    assert "infinity" in client.post("/v1/completions", content=body, headers=JSON).json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"a": ', "EOF"),
        (b"[" * 210 + b"]" * 210, "200 levels"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": "\xff"}', "UTF-8"),
    ],
)
def test_what_is_no_json_is_told_in_words(body: bytes, told: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=told):
        read_json(body)


BAD_ARGUMENTS = {
    "half of a pair": '{"a": "\\ud800"}',
    "half of a pair as a name": '{"\\udfff": 1}',
    "not a number": '{"a": NaN}',
    "without end": '{"a": [1e999]}',
    "deep": '{"a": ' + "[" * 150 + "]" * 150 + "}",
    "too deep": '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    "long number": '{"a": ' + "1" * 5000 + "}",
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_arguments_of_earlier_calls_are_read_as_strictly_as_a_body(client: TestClient, case: str) -> None:
    call = {"name": "f", "arguments": BAD_ARGUMENTS[case]}
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}
    tools = {**answer, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"messages": [user, tools]}, "messages[1].tool_calls[0].function.arguments"),
        (
            "/v1/chat/completions",
            {"messages": [{**answer, "function_call": call}]},
            "messages[0].function_call.arguments",
        ),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1", **call}]}, "input[0].arguments"),
    ]
    for path, body, field in asked:
        reply = client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_calls_that_can_not_be_told_as_objects_do_not_break_a_reply(engine: AsyncLLM, case: str) -> None:
    """A model writes what it likes."""
    (output,) = asyncio.run(_one(engine))
    text = f'{{"name": "f", "arguments": {BAD_ARGUMENTS[case]}}}'
    output = replace(output, outputs=(replace(output.outputs[0], text=text),))
    answers = AnswerShape(calls=PLAIN, functions={"f": {}})
    reply = message_reply(output, MessageShape(model="m", answers=answers))
    shape = OllamaShape(
        model="m", kind="chat", answers=answers, speller=Speller(None), logprobs=False, load_seconds=0.0
    )
    assert reply["content"][0]["input"] == {}
    for told in (reply, ollama_reply(output, shape)):
        assert JSONResponse(told).body


async def _one(engine: AsyncLLM) -> list[RequestOutput]:
    return [await engine.generate("Hi", SamplingParams(max_tokens=1, temperature=0))]


@pytest.mark.parametrize("value", ["NaN", '"\\ud800"', "1e999", "[" * 150 + "]" * 150])
def test_a_parameter_that_is_no_json_is_a_text(value: str) -> None:
    answer = f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>"
    tags = next(known for known in FORMATS if known.mark == "<function=")
    deltas = AnswerShape(calls=tags, functions={"f": {}}).read(answer)
    written = "".join(delta.text for delta in deltas if isinstance(delta, Arguments))
    assert json.loads(written) == {"a": value}


def test_a_mark_of_byte_order_is_no_matter() -> None:
    assert read_json(b'\xef\xbb\xbf{"a": 1.5}') == {"a": 1.5}


def test_every_operation_reads_its_body_so(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    reading = [path for path, operations in paths.items() if "requestBody" in operations.get("post", {})]
    assert len(reading) > 8
    for path in reading:
        reply = client.post(path, content=b'{"a": "\\ud800"}', headers=JSON)
        assert reply.status_code == 400
        assert "half of a surrogate pair" in reply.text


@pytest.mark.parametrize("path", ["/api/show", "/tokenize"])
def test_a_body_that_does_not_say_what_it_is_is_json_unless_a_page_sends_it(client: TestClient, path: str) -> None:
    body = b'{"prompt": "x"}' if path == "/tokenize" else b'{"model": "parlay-mini"}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl calls all that it sends
    assert (
        client.post(path, content=body).status_code == client.post(path, content=body, headers=form).status_code == 200
    )
    evil = {"Origin": "http://evil.example"}
    for headers in (evil, {**form, **evil}, {**form, "Sec-Fetch-Site": "cross-site"}, {"Content-Type": "text/plain"}):
        reply = client.post(path, content=body, headers=headers)
        assert reply.status_code == 400
        assert "application/json" in reply.text
