"""What a request takes that says nothing of sampling: what the model's makers recommend, under every API."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from starlette.testclient import TestClient

from parlay import LLM
from parlay.aio import AsyncLLM
from parlay.models.fetch.resolving import resolve
from parlay.serve.app import create_app
from parlay.serve.settings import Settings

_SAID = {"do_sample": True, "temperature": 0.5, "top_k": 1, "top_p": 0.75}
"""Of the likeliest token alone each text is the greedy one, whatever its seed."""
_CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
_ASKED = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 12},
    "/v1/chat/completions": _CHAT,
    "/v1/messages": _CHAT,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 12},
    "/api/chat": {**_CHAT, "stream": False, "options": {"num_predict": 12}},
    "/api/generate": {"prompt": "Hello", "stream": False, "options": {"num_predict": 12}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "said"
    shutil.copytree(resolve("parlay-mini"), place)
    (place / "generation_config.json").write_text(json.dumps(_SAID))
    return place


def _clients(folder: Path, config: Literal["auto", "vllm"]) -> Iterator[TestClient]:
    engine = AsyncLLM(LLM(str(folder), generation_config=config))
    yield TestClient(create_app({"said": engine}, Settings()), raise_server_exceptions=False)
    asyncio.run(engine.close(0))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    yield from _clients(folder, "auto")


@pytest.fixture(scope="module")
def plain_client(folder: Path) -> Iterator[TestClient]:
    yield from _clients(folder, "vllm")


def _answer(client: TestClient, path: str, **fields: object) -> Any:
    reply = client.post(path, json={"model": "said", **_ASKED[path], **fields})
    assert reply.status_code == 200, reply.text
    said = reply.json()
    for key in ("choices", "content", "output", "message", "response"):
        if key in said:
            return said[key]
    raise AssertionError(said)


def _text(answer: object) -> str:
    """Return the answer without the ids of its items, which differ each time."""
    if isinstance(answer, list):
        return "".join(map(_text, answer))
    return _text([each for key, each in answer.items() if key != "id"]) if isinstance(answer, dict) else str(answer)


@pytest.mark.parametrize("path", _ASKED)
def test_a_request_that_says_nothing_takes_what_the_makers_recommend(client: TestClient, path: str) -> None:
    assert len({_text(_answer(client, path)) for _ in range(4)}) == 1


def test_what_a_request_names_counts(client: TestClient) -> None:
    assert len({_text(_answer(client, "/v1/completions", top_k=0, temperature=2)) for _ in range(4)}) > 1


def test_the_owner_may_choose_the_defaults_of_the_api(plain_client: TestClient) -> None:
    assert len({_text(_answer(plain_client, "/v1/completions")) for _ in range(6)}) > 1


def test_a_response_tells_what_it_took(client: TestClient, plain_client: TestClient) -> None:
    said = [each.post("/v1/responses", json=_ASKED["/v1/responses"]).json() for each in (client, plain_client)]
    assert [(each["temperature"], each["top_p"]) for each in said] == [(0.5, 0.75), (1.0, 1.0)]


def test_llama_servers_requests_keep_their_own_defaults(client: TestClient) -> None:
    reply = client.post("/completion", json={"prompt": "Hello", "n_predict": 2}).json()
    settings = reply["generation_settings"]
    assert (settings["temperature"], settings["top_k"], settings["top_p"]) == (0.8, 40, 0.95)
