"""Bodies made to do harm: the server refuses them or answers them, and goes on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

GROWTH = (1, 10, 100, 1_000, 3_000, 10_000)


def schemas(size: int) -> list[dict[str, Any]]:
    """Each as large as ``size`` says, in a way of its own."""
    names = [f"n{place}" for place in range(size)]
    chain = {name: {"$ref": f"#/$defs/n{place + 1}"} for place, name in enumerate(names)}
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(min(size, 400)):  # more levels than that no client can write
        deep = {"type": "object", "properties": {"a": deep}}
    return [
        {"$ref": "#/$defs/n0", "$defs": {**chain, f"n{size}": {"type": "integer"}}},
        {"type": "object", "required": names},
        {"type": "object", "properties": {name: {"type": "integer"} for name in names}},
        {"anyOf": [{"type": "object", "properties": {name: {}}, "required": [name]} for name in names]},
        {"enum": names},
        {"type": "string", "minLength": size, "maxLength": size + 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": size},
        deep,
    ]


def forms(size: int) -> list[dict[str, Any]]:
    chain = "\n".join(f'r{place}: "a" r{place + 1}' for place in range(size))
    return [
        *({"json": schema} for schema in schemas(size)),
        {"grammar": f'start: r0\n{chain}\nr{size}: "b"'},
        {"grammar": "start: " + "(" * size + '"a"' + ")" * size},
        {"grammar": "start: " + '"a"? ' * size},
        {"grammar": "start: " + " | ".join(f'"a{place}"' for place in range(size))},
        {"regex": "a" + f"{{{size * 100}}}"},
        {"regex": "(" * size + "a" + ")" * size},
        {"regex": "(a|b)*" * size},
        {"choice": [f"choice {place}" for place in range(size)]},
    ]


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
def test_ten_thousand_hostile_bodies_against_every_constraint(make_app: Callable[..., Any]) -> None:
    client = TestClient(make_app(), raise_server_exceptions=False)
    choose = random.Random(0)
    every = {size: bodies(size) for size in GROWTH}
    for _ in range(10_000):
        path, body = choose.choice(every[choose.choice(GROWTH)])
        _answers(client, path, body)
    assert client.get("/health").status_code == 200
