"""`superposed` of /v1/completions: drafts to pick from, and what it can't be used with."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import SamplingParams
from parlay.aio import AsyncLLM
from parlay.llm.suggesting import Suggestion
from parlay.ngrams import NgramOptions, Vocabulary, build_from_ids

PROMPT = "Once upon a time there was"


def test_a_completion_may_be_superposed(client: TestClient, engine: AsyncLLM) -> None:
    """Its choices are the drafts of `LLM.suggest`, the best first, whatever else the server decodes."""
    body = {"prompt": [PROMPT, "The dog"], "superposed": True, "n": 3, "max_tokens": 5, "temperature": 0.2}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    reply = response.json()
    expected = engine.llm.suggest([PROMPT, "The dog"], SamplingParams(n=3, max_tokens=5))
    assert [each["text"] for each in reply["choices"]] == [each.text for output in expected for each in output.outputs]
    assert [each["index"] for each in reply["choices"]] == [0, 1, 2, 3, 4, 5]
    assert (reply["parlay"]["strategy"], reply["parlay"]["exactness"]) == ("superposed", "lossy")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stream": True}, "superposed can't be used with stream"),
        ({"exactness": "bits"}, "superposed drafts are lossy"),
        ({"best_of": 2}, "superposed can't be used with best_of"),
        ({"logprobs": 2}, "superposed can't be used with logprobs"),
        ({"logprobs": 0}, "superposed can't be used with logprobs"),
        ({"presence_penalty": 1}, "presence_penalty can't be used with superposed drafts"),
        ({"max_tokens": 999}, "max_tokens is 999"),
        ({"superposed": "maybe"}, "superposed"),
    ],
)
def test_what_it_cannot_be_used_with_is_named(client: TestClient, fields: dict[str, Any], said: str) -> None:
    response = client.post("/v1/completions", json={"prompt": PROMPT, "superposed": True, "max_tokens": 4, **fields})
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_an_ngram_model_of_other_tokens_is_named(make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    build_from_ids(tmp_path / "m", [[1, 2]], Vocabulary(5, "other", "abc"), NgramOptions(order=2))
    client = TestClient(make_app(ngrams=tmp_path / "m"))
    response = client.post("/v1/completions", json={"prompt": PROMPT, "superposed": True})
    assert response.status_code == 400
    assert "another tokenizer (other)" in response.json()["error"]["message"]


def test_drafts_end_when_the_client_leaves(
    make_app: Callable[..., FastAPI], engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves in the third of a thousand steps."""
    steps: list[int] = []
    gone, step = threading.Event(), Suggestion.step

    def watched(self: Suggestion, rows: int) -> None:
        steps.append(1)
        if len(steps) == 3:
            assert gone.wait(60)
        step(self, rows)

    monkeypatch.setattr(Suggestion, "step", watched)
    body = json.dumps({"prompt": [PROMPT] * 8, "superposed": True, "max_tokens": 128, "ignore_eos": True}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        if (message := next(messages, None)) is not None:
            return message
        while len(steps) < 3:
            await asyncio.sleep(0.001)
        gone.set()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Nobody reads it."""

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    asyncio.run(make_app()(scope, receive, send))
    assert 3 <= len(steps) < 100
    monkeypatch.undo()
    asyncio.run(engine.between_steps(lambda llm: llm.runner.check()))
    (output,) = engine.llm.suggest(PROMPT, SamplingParams(n=2, max_tokens=3))
    assert len(output.outputs) == 2
