"""`superposed` of /v1/completions: drafts to pick from, and what it can't be used with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import SamplingParams
from parlay.aio import AsyncLLM
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
