"""Answers of a model that writes with a datastore say which parts of them are from which document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from parlay import LLM, Nest
from parlay.aio import AsyncLLM
from parlay.cli import main
from parlay.serve.app import create_app
from parlay.serve.settings import Settings

pytest.importorskip("faiss")

FOX = "The quick brown fox jumps over the lazy dog and runs away into the dark green forest, where nobody finds it."


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "fox.txt").write_text(FOX)
    (folder / "more.jsonl").write_text('{"text": "Once upon a time there was a bear."}\n{"text": "A cat sat."}\n')
    store = folder / "made.store"
    words = ["datastore", "build", str(folder / "fox.txt"), str(folder / "more.jsonl"), "--states"]
    assert main([*words, "--model", "parlay-mini", "-o", str(store)]) == 0
    engine = AsyncLLM(LLM("parlay-mini", ensemble=Nest(str(store), neighbours=8, alpha=0.9)))
    with TestClient(create_app({"parlay-mini": engine}, Settings())) as client:
        yield client


def asked(client: TestClient, path: str, **body: object) -> Any:
    reply = client.post(path, json={"model": "parlay-mini", "temperature": 0, "max_tokens": 16, **body})
    assert reply.status_code == 200, reply.text
    return reply


def check(parts: list[dict[str, Any]]) -> None:
    longest = max(parts, key=lambda part: int(part["tokens"]))
    assert list(longest) == ["text", "document", "position", "tokens", "share"]
    assert longest["document"].endswith("fox.txt")
    assert longest["tokens"] >= 8
    assert longest["text"] in FOX
    assert 0.5 <= longest["share"] <= 1


def test_a_completion_says_what_it_quotes(client: TestClient) -> None:
    prompt = FOX[:39]
    choice = asked(client, "/v1/completions", prompt=prompt).json()["choices"][0]
    assert FOX.startswith(prompt + choice["text"][:20])
    check(choice["attributions"])


def test_a_stream_says_it_of_each_token(client: TestClient) -> None:
    text = asked(client, "/v1/completions", prompt=FOX[:39], stream=True, strategy="nest").text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    told = [choice["parlay"] for chunk in chunks for choice in chunk["choices"]]
    assert all(len(each["origins"]) == len(each["pieces"]) for each in told if "origins" in each)
    origins = [origin for each in told for origin in each.get("origins", []) if origin is not None]
    assert len(origins) >= 8
    assert list(origins[0]) == ["document", "position", "share"]
    places = [origin["position"] for origin in origins[:8]]
    assert places == list(range(places[0], places[0] + 8))


def test_a_chat_has_the_field(client: TestClient) -> None:
    messages = [{"role": "user", "content": FOX[:39]}]
    (choice,) = asked(client, "/v1/chat/completions", messages=messages).json()["choices"]
    assert isinstance(choice["attributions"], list)


def test_guidance_is_refused_in_one_line(client: TestClient) -> None:
    body = {"model": "parlay-mini", "prompt": "a", "guidance_scale": 2}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert "writes with a datastore" in reply.json()["error"]["message"]
