"""Bodies made to do harm: the server refuses them or answers them, and goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from benchmarks.serving.growing import SIZES, forms, schemas


def bodies(size: int) -> list[tuple[str, dict[str, Any]]]:
    """Every way by which a constraint reaches the server."""
    chat = {"model": "parlay-mini", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    structured = [("/v1/completions", {"prompt": "x", "structured_outputs": form}) for form in forms(size)]
    formatted = [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": s}}},
        )
        for s in schemas(size)
    ]
    called = [
        ("/v1/chat/completions", {"tools": [tool], "tool_choice": "required"})
        for s in schemas(size)
        for tool in [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", **s}}}]
    ]
    return [
        (path, chat | body if "chat" in path else {"model": "parlay-mini", "max_tokens": 2} | body)
        for path, body in (*structured, *formatted, *called)
    ]


def _answers(client: TestClient, path: str, body: dict[str, Any]) -> None:
    """With a result or with a refusal of one line."""
    reply = client.post(path, json=body)
    assert reply.status_code in (200, 400, 413), (reply.text[:300], str(body)[:300])
    if reply.status_code != 200:
        message = reply.json()["error"]["message"]
        assert "\n" not in message
        assert "panic" not in message
        assert len(message) < 700


@pytest.mark.parametrize("size", [10, 3_000])
def test_no_constraint_ends_the_server(client: TestClient, size: int) -> None:
    for path, body in random.Random(size).sample(bodies(size), 12):
        _answers(client, path, body)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1}' for n in range(3000)) + '\nr3000: "b"'},
        {"json": schemas(2500)[0]},
        {"json": schemas(50_000)[1]},
    ],
    ids=["chained rules", "chained references", "required names"],
)
def test_what_once_ended_the_process_is_answered(client: TestClient, form: dict[str, Any]) -> None:
    _answers(client, "/v1/completions", {"model": "parlay-mini", "prompt": "x", "structured_outputs": form})


@pytest.mark.slow
def test_ten_thousand_hostile_bodies_against_every_constraint(
    make_app: Callable[..., Any], tell: Callable[[str], None]
) -> None:
    client = TestClient(make_app(), raise_server_exceptions=False)
    choose = random.Random(0)
    every = {size: bodies(size) for size in SIZES}
    for count in range(1, 10_001):
        path, body = choose.choice(every[choose.choice(SIZES)])
        _answers(client, path, body)
        if count % 200 == 0:
            tell(f"{count:,} of 10,000 bodies")
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": ""}], "tools": [{"name": "f", "input_schema": {}}]},
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": 1e-308}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "options": {"temperature": 1e-308}}),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": [0], "structured_outputs": {"regex": "ab"}}),
    ],
)
def test_what_was_once_a_fault_of_the_server(client: TestClient, path: str, body: dict[str, Any]) -> None:
    assert client.post(path, json=body).status_code in (200, 400)


GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 1}},
}
Path = tuple[str | int, ...]


def _numbers(schemas: dict[str, Any], schema: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    """Yield the path of every number in a body, those of a list's first entry among them."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rsplit("/", 1)[1]]
    if schema.get("type") in ("integer", "number"):
        yield path
    inner = [(path, each) for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, [])]
    inner += [((*path, name), each) for name, each in schema.get("properties", {}).items()]
    inner += [((*path, 0), each) for each in [schema.get("items")] if each]
    for at, each in inner if len(path) < 5 else ():
        yield from _numbers(schemas, each, at)


def _with_number(body: dict[str, Any], path: Path, number: str) -> str:
    """Write a body with a number at a path, which may be one that no float holds."""
    value: Any = "@"
    for part in reversed(path):
        value = [value] if isinstance(part, int) else {part: value}
    merged = {
        name: {**body[name], **new} if isinstance(new, dict) and name in body else new for name, new in value.items()
    }
    return json.dumps({"model": "parlay-mini", **body, **merged}).replace('"@"', number)


def test_no_number_is_too_large_to_refuse(make_app: Callable[..., FastAPI]) -> None:
    app = make_app()
    client, document = TestClient(app, raise_server_exceptions=False), app.openapi()
    failed, tried = [], 0
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        for field in dict.fromkeys(_numbers(document["components"]["schemas"], schema)):
            for number in ("1" + "0" * 400, "-1" + "0" * 400):
                body = _with_number(GENERATING.get(path, {}), field, number)
                reply = client.post(path, content=body, headers={"content-type": "application/json"})
                tried += 1
                failed += [(path, field, number[:2])] if reply.status_code >= 500 else []
    assert failed == []
    assert tried > 100
