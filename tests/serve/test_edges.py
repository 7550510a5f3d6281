"""Requests at the edges: headers without end, empty contents, calls that are cut off."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import LLM
from parlay.aio import AsyncLLM
from parlay.serve.guard import connection
from parlay.serve.guard.connection import Connection

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
NOWHERE = "there is nothing under this address: GET /openapi.json lists what there is"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def address(make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server that waits half a second for headers."""
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.5)
    server = uvicorn.Server(uvicorn.Config(make_app(), log_level="critical", lifespan="off", http=Connection))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        yield bound.getsockname()
        server.should_exit = True
        thread.join()


def _ask(address: tuple[str, int], sent: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(address, timeout=600) as client:
        try:
            client.sendall(sent)
            return b"".join(iter(lambda: client.recv(65536), b""))
        except (BrokenPipeError, ConnectionResetError):
            return b"closed"


def test_headers_that_do_not_come_close_the_connection(address: tuple[str, int]) -> None:
    assert _ask(address, b"") == b""
    assert b"408" in _ask(address, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ").partition(b"\r\n")[0]


def test_headers_without_end_are_refused(address: tuple[str, int]) -> None:
    reply = _ask(address, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * 4_000_000)
    assert b"431" in reply or reply == b"closed"


def test_two_hosts_are_refused(address: tuple[str, int]) -> None:
    reply = _ask(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n")
    assert b"400" in reply.partition(b"\r\n")[0]
    assert b"two Host headers" in reply


def test_a_connection_that_behaves_is_kept(address: tuple[str, int]) -> None:
    client = http.client.HTTPConnection(*address, timeout=600)
    client.connect()
    opened = client.sock
    for _ in range(3):
        client.request("GET", "/health")
        reply = client.getresponse()
        assert (reply.status, reply.read()) == (200, b'{"status":"ok"}')
        assert client.sock is opened
    client.close()


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/"])
def test_monitors_may_ask_for_the_head_only(client: TestClient, path: str) -> None:
    assert client.head(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/api/chat", "/api/chat"),
        ("/api/chat/completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_a_base_url_with_a_part_too_few_or_too_many(client: TestClient, path: str, near: str) -> None:
    reply = client.post(path, json={})
    assert reply.status_code == 404
    assert f"give the client a base URL that leads to {near}" in reply.text
    assert reply.json().get("type") != "error"


def test_an_address_like_none_gets_no_advice(client: TestClient) -> None:
    for path in ("/v1/moderations", "/v1/api/", "/v1" * 100):
        assert client.get(path).json()["error"]["message"] == NOWHERE
    assert client.get(CHAT).json()["error"]["message"].endswith("GET /openapi.json lists what it takes")


def test_values_are_refused_in_words(client: TestClient) -> None:
    picture = client.post("/api/generate", json={"prompt": "x", "images": ["aa"]}).json()
    assert picture == {"error": "images: can't be read: this server reads text only"}
    tool = {"type": "function", "function": {"name": "a.b"}}
    error = client.post(CHAT, json={"messages": [USER], "tools": [tool]}).json()["error"]
    assert error["message"] == "tools[0].function.name must have 1 to 64 letters, digits, _ or -"
    error = client.post(CHAT, json={"messages": [USER], "logit_bias": {"the": 1}}).json()["error"]
    wanted = 'a key must be a token id in digits, as "50256" and not "050256"'
    assert (error["message"], error["param"]) == (f"logit_bias.the: {wanted}", "logit_bias.the")


def test_no_message_tells_where_a_model_lies(client: TestClient, engine: AsyncLLM, monkeypatch: Any) -> None:
    reply = client.post(CHAT, json={"messages": [USER], "strategy": "layer-skip:attention=99"})
    assert reply.status_code == 400
    assert "/" not in reply.json()["error"]["message"]


def test_a_null_content_is_refused_in_words(client: TestClient) -> None:
    error = client.post(CHAT, json={"messages": [{"role": "user", "content": None}]}).json()["error"]
    assert error["param"] == "messages[0].content"
    assert "must be a string" in error["message"]


def test_a_call_that_is_cut_off_leaves_no_rubbish(client: TestClient) -> None:
    for tokens in (2, 4, 9, 16):
        body = {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": tokens}
        choice = client.post(CHAT, json=body).json()["choices"][0]
        assert "{" not in (choice["message"]["content"] or "")
        if choice["finish_reason"] == "tool_calls":
            assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) is not None


def test_the_document_and_the_server_agree(client: TestClient) -> None:
    assert client.post(CHAT, json={"messages": [USER], "top_logprobs": 0, "max_tokens": 1}).status_code == 200
    prompt = client.get("/openapi.json").json()["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]
    assert {"type": "string", "minLength": 1} in prompt.get("anyOf", prompt.get("oneOf"))
    assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400


def test_a_missing_model_is_the_only_one(client: TestClient, engine: AsyncLLM) -> None:
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()["model"] == "parlay-mini"


def test_the_python_api_and_the_server_take_parts_alike(client: TestClient, engine: AsyncLLM) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "more."}]}
    whole = {"role": "user", "content": "Tell me more."}
    ids = [engine.llm.job([message]).samples[0].request.prompt for message in (parts, whole)]
    assert ids[0] == ids[1]
    usage = [client.post(CHAT, json={"messages": [m], "max_tokens": 1}).json()["usage"] for m in (parts, whole)]
    assert usage[0]["prompt_tokens"] == usage[1]["prompt_tokens"] == len(ids[0])
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\] is no text"):
        engine.llm.job([{"role": "user", "content": [{"type": "image_url"}]}])
    assert isinstance(engine.llm, LLM)
