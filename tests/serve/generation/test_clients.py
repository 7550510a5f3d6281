"""Requests of clients that can't be installed beside the server, sent as they send them.

`client_requests.json` holds bodies of their requests as `parlay serve --log-prompts` logs them, with texts of our own;
those of lm-eval and what Open WebUI asks follow their sources.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

Json = dict[str, Any]
SAID = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, list[tuple[str, Json]]] = json.loads(
    Path(__file__).with_name("client_requests.json").read_text(encoding="utf-8")
)
LAST = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": "event: response.",
    "/api/chat": '"done":true',
    "/api/generate": '"done":true',
}
"""Fields at the end of a stream."""
TEXT = {
    "/v1/chat/completions": lambda told: told["choices"][0]["message"],
    "/v1/completions": lambda told: told["choices"][0]["text"],
    "/v1/messages": lambda told: told["content"],
    "/v1/responses": lambda told: told["output"],
    "/api/chat": lambda told: told["message"],
    "/api/generate": lambda told: told["response"],
    "/api/show": lambda told: told["capabilities"],
    "/v1/messages/count_tokens": lambda told: told["input_tokens"],
}
"""Where an answer stands that came whole."""


@pytest.mark.parametrize("name", REQUESTS)
def test_what_it_sends_is_answered(client: TestClient, name: str) -> None:
    for path, body in REQUESTS[name]:
        answer = client.post(path, json={**body, "model": "parlay-mini"})
        assert answer.status_code == 200, (body, answer.text)
        if body.get("stream"):
            assert LAST[path] in answer.text.strip().split("\n\n")[-1]
        else:
            assert TEXT[path](answer.json())


def test_open_webui_finds_models_as_those_of_ollama_and_chats_with_them(client: TestClient) -> None:
    """Ollama's client knows a model by the name in the list alone, and puts `:latest` behind a name without a colon."""
    assert client.get("/api/version").json()["version"]
    (listed,) = client.get("/api/tags").json()["models"]
    (loaded,) = client.get("/api/ps").json()["models"]
    assert datetime.fromisoformat(loaded["expires_at"])
    assert loaded["name"] == listed["name"] == listed["model"] == "parlay-mini:latest"
    asked = {"model": listed["model"], "messages": SAID}
    chat = {**asked, "options": {"num_predict": 4}, "stream": True}
    assert [json.loads(line)["done"] for line in client.post("/api/chat", json=chat).text.splitlines()][-1] is True
    assert client.post("/api/show", json={"name": listed["model"]}).json()["details"]
    assert client.post("/v1/chat/completions", json={**asked, "max_tokens": 4}).json()["choices"]
    plain = {"model": listed["model"], "prompt": "Once", "max_tokens": 4}
    assert client.post("/v1/completions", json=plain).json()["choices"]


def test_open_webui_finds_models_as_those_of_openai_and_chats_with_them(client: TestClient) -> None:
    (listed,) = client.get("/v1/models", headers={"Authorization": "Bearer any"}).json()["data"]
    asked = {"model": listed["id"], "messages": SAID, "max_completion_tokens": 4}
    chat = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    assert client.post("/v1/chat/completions", json=chat).text.rstrip().endswith("data: [DONE]")
    title = {**asked, "stream": False, "metadata": {"task": "title_generation", "chat_id": "c"}}
    assert client.post("/v1/chat/completions", json=title).json()["choices"][0]["message"]
