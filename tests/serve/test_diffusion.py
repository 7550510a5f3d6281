"""A diffusion model behind OpenAI's API: in order, cut where asked, the same for the same seed, and refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from parlay import LLM
from parlay.serve.app import create_app
from parlay.serve.settings import Settings
from parlay.testing.diffusion import SlowDiffusion, save_diffusion
from tests.serve.conftest import Shared

PROMPT = [9, 11, 4, 7, 20]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SlowDiffusion]:
    folder = tmp_path_factory.mktemp("sdar")
    return folder, save_diffusion("sdar", folder)


@pytest.fixture(scope="module")
def client(slow: tuple[Path, SlowDiffusion]) -> Iterator[TestClient]:
    engine = Shared(LLM(str(slow[0]), dtype="float32"))
    yield TestClient(create_app({"sdar": engine}, Settings()), raise_server_exceptions=False)
    asyncio.run(engine.end())


def asked(client: TestClient, **fields: Any) -> dict[str, Any]:
    body = {"model": "sdar", "prompt": PROMPT, "max_tokens": 9, "temperature": 0, "ignore_eos": True, **fields}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def text_of(client: TestClient, **fields: Any) -> str:
    text: str = asked(client, **fields)["choices"][0]["text"]
    return text


def test_a_text_is_the_reference_s_and_comes_in_order_as_a_stream(
    client: TestClient, slow: tuple[Path, SlowDiffusion]
) -> None:
    strategy = "denoise:selector=confidence,k=2"
    answer = asked(client, strategy=strategy)
    expected = slow[1].write(PROMPT, 9, canvas=0, k=2)
    decoded = client.post("/detokenize", json={"model": "sdar", "tokens": expected}).json()
    assert answer["choices"][0]["text"] == decoded["prompt"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 9
    body = {"model": "sdar", "prompt": PROMPT, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json={**body, "strategy": strategy}) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
    pieces = [choice["text"] for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(pieces) == answer["choices"][0]["text"]


def test_a_stop_inside_a_block_cuts_the_text_there(client: TestClient) -> None:
    whole = text_of(client, strategy="denoise:selector=threshold,threshold=0")
    stopped = asked(client, strategy="denoise:selector=threshold,threshold=0", stop=whole[2:3])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (whole[: whole.index(whole[2])], "stop")


def test_the_seed_decides_a_sampled_text_whatever_runs_beside_it(client: TestClient) -> None:
    """With the default strategy, which is denoise here; log-probabilities are those of the rows that decided."""
    fields = {"temperature": 0.9, "seed": 5, "logprobs": 1}
    first = asked(client, **fields, n=3)["choices"]
    again = asked(client, **fields)["choices"][0]
    assert again["text"] == first[0]["text"]
    assert len({choice["text"] for choice in first}) == 3
    assert len(again["logprobs"]["token_logprobs"]) == 9
    assert all(value < 0 for value in again["logprobs"]["token_logprobs"])


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("none", "writes token by token"),
        ("denoise:threshold=1.5", "threshold"),
        ("denoise:selector=factor,threshold=0.8", "not an option of selector=factor"),
        ("denoise:selector=mask-predict,block=2", "remove block"),
        ("denoise:block=3", "does not divide the blocks of 4 tokens"),
        ("denoise:selector=best", "selector"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(client: TestClient, strategy: str, reason: str) -> None:
    reply = client.post(
        "/v1/completions", json={"model": "sdar", "prompt": PROMPT, "max_tokens": 4, "strategy": strategy}
    )
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]


@pytest.mark.parametrize("strategy", [None, "auto", "none", "denoise"])
def test_no_exactness_is_promised_and_what_is_advised_works(client: TestClient, strategy: str | None) -> None:
    body = {"model": "sdar", "prompt": PROMPT, "max_tokens": 4, "strategy": strategy, "exactness": "bits"}
    error = client.post("/v1/completions", json=body).json()["error"]
    assert error["message"] == "exactness bits is stricter than this model guarantees: ask for lossy"
    assert (error["param"], error["code"]) == ("exactness", "invalid_exactness")
    if strategy != "none":
        answer = client.post("/v1/completions", json={**body, "exactness": "lossy"}).json()
        assert answer["parlay"]["exactness"] == "lossy"


def test_a_model_that_writes_token_by_token_fills_no_canvas(make_app: Any) -> None:
    reply = TestClient(make_app()).post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "strategy": "denoise"})
    assert reply.status_code == 400
    assert "writes its text in order" in reply.json()["error"]["message"]
