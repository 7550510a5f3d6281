"""``/v1/embeddings``, ``/v1/score``, ``/v1/rerank``: the states that the LM head would read, and their cosines."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from parlay.llm import judging
from parlay.llm.embedding import Pooled, Reading
from parlay.llm.judging import judge_prompts
from parlay.types import Segment

TEXTS = ["The fox jumps.", "A dog sleeps in the sun.", "The fox jumps."]


def embeddings(client: TestClient, **body: Any) -> list[Any]:
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def test_embeddings_are_the_states_that_the_head_reads(client: TestClient, engine: AsyncLLM) -> None:
    """Of the last token or the mean of all, for texts together as alone, whatever else is cached."""
    runner, ids = engine.llm.runner, engine.llm.token_ids(TEXTS[0])
    runner.open(77, ())
    assert runner.reserve(77, len(ids))
    states = runner.forward([Segment(77, ids)], (runner.spec.num_layers,)).taps[runner.spec.num_layers].float()
    runner.release(77)
    for pooling, expected in (("last", states[-1]), ("mean", states.mean(0))):
        together = embeddings(client, input=TEXTS, pooling=pooling, normalize=False)
        torch.testing.assert_close(torch.tensor(together[0]), expected, rtol=1e-5, atol=1e-5)
        assert together[0] == together[2] == embeddings(client, input=list(ids), pooling=pooling, normalize=False)[0]


def test_base64_has_the_same_numbers_and_lengths_are_one(client: TestClient) -> None:
    """As OpenAI's clients ask for them."""
    (plain,) = embeddings(client, input=TEXTS[0])
    (packed,) = embeddings(client, input=TEXTS[0], encoding_format="base64")
    assert list(struct.unpack(f"<{len(plain)}f", base64.b64decode(packed))) == pytest.approx(plain, abs=0)
    assert sum(number * number for number in plain) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("../tokenize", {"prompt": "x", "model": None, "add_special_tokens": None, "return_token_strs": None}),
        ("embeddings", {"input": "x", "encoding_format": None, "dimensions": None, "user": None, "pooling": None}),
        ("rerank", {"query": "x", "documents": ["a", "b"], "top_n": None, "return_documents": None}),
    ],
)
def test_null_is_as_good_as_absent(client: TestClient, path: str, body: dict[str, Any]) -> None:
    plain = {name: value for name, value in body.items() if value is not None}
    answers = [client.post(f"/v1/{path}", json=each).json() for each in (body, plain)]
    assert "error" not in answers[0]
    assert answers[0].keys() == answers[1].keys()


def test_a_text_longer_than_a_forward_is_embedded_in_pieces(client: TestClient) -> None:
    """Its last token sees all of it: the beginning counts."""
    words = "one two three four " * 300
    found = embeddings(client, input=[f"red {words}", f"blue {words}"], normalize=False)
    assert found[0] != found[1]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pieces_of_any_size_give_the_same_embeddings(engine: AsyncLLM, pooling: str) -> None:
    """While others stream, pieces are shorter."""
    texts = [engine.llm.token_ids(text) for text in (*TEXTS, "one two three four " * 9)]

    def embedded(rows: int) -> list[list[float]]:
        reading = Pooled(engine.llm.runner, texts, pooling)
        reading.open()
        while not reading.over:
            reading.step(rows)
        found = reading.embeddings(normalize=False)
        reading.release()
        return found

    whole = torch.tensor(embedded(512))
    for rows in (1, 10, 30):
        torch.testing.assert_close(torch.tensor(embedded(rows)), whole, rtol=1e-6, atol=1e-6)


def test_scores_are_cosines_and_documents_are_ordered_by_them(client: TestClient) -> None:
    """The same text scores 1 and comes first."""
    body = {"text_1": TEXTS[0], "text_2": TEXTS}
    scores = [entry["score"] for entry in client.post("/v1/score", json=body).json()["data"]]
    assert scores[0] == pytest.approx(1, abs=1e-5)
    assert scores[0] == scores[2] > scores[1]
    ranked = client.post("/v1/rerank", json={"query": TEXTS[0], "documents": TEXTS[:2], "top_n": 1}).json()
    assert [result["index"] for result in ranked["results"]] == [0]
    assert ranked["results"][0]["document"] == {"text": TEXTS[0]}
    assert client.post("/rerank", json={"query": "a", "documents": [{"text": "b"}]}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [10**6]}, "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "pooling"),
        ("/v1/embeddings", {"input": "word " * 20_000}, "input"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_field(
    client: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    """A 400 that names the field."""
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


LONG, LONGER = "word " * 5000, "word " * 100_000


@pytest.mark.parametrize("long", [LONG, LONGER])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "LONG"}, "input"),
        ("/v1/embeddings", {"input": ["x", "LONG"]}, "input[1]"),
        ("/v1/score", {"text_1": "LONG", "text_2": ["x"]}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": ["x", "LONG"]}, "text_2[1]"),
        ("/v1/rerank", {"query": "LONG", "documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "x", "documents": ["x", {"text": "LONG"}]}, "documents[1]"),
        ("/v1/rerank", {"query": "x", "documents": ["x", "LONG"], "score_by": "yes-no"}, "documents[1]"),
    ],
)
def test_a_text_that_is_too_long_is_refused_by_its_place(
    client: TestClient, path: str, body: dict[str, Any], param: str, long: str
) -> None:
    """As a completion's prompt is: the field, which of its texts, the model's limit and the code."""
    response = client.post(path, content=json.dumps(body).replace("LONG", long))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert param in error["message"]
    assert error["message"].endswith("and this model holds 4096: shorten it")


def test_ids_that_are_wrong_and_a_text_above_the_servers_limit_are_refused_by_their_place(
    make_app: Callable[..., FastAPI],
) -> None:
    client = TestClient(make_app(max_prompt_tokens=5))
    for texts, said in (
        ([[1], [10**6]], "input[1] has a token id that is not from 0 to 4095"),
        ([[1], [1] * 6], "prompt is too long: input[1] has 6 tokens, and this server takes 5 at most: shorten it"),
    ):
        error = client.post("/v1/embeddings", json={"input": texts}).json()["error"]
        assert (error["param"], error["message"]) == ("input[1]", said)


def test_a_chat_model_says_whether_a_document_answers(
    client: TestClient, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share of the first word in the chances of both, after the prompt that Qwen3-Reranker was trained with."""
    llm = engine.llm
    documents = ["A narrow valley.", "A kind of cheese."]
    body = {"query": "gorge", "documents": documents, "score_by": "yes-no", "instruction": "Explain"}
    refused = client.post("/v1/rerank", json=body)
    assert (refused.status_code, "one token each" in refused.json()["error"]["message"]) == (400, True)
    assert refused.json()["error"]["param"] == "score_by"
    monkeypatch.setattr(judging, "ANSWERS", ("is", "not"))
    reply = client.post("/v1/rerank", json=body).json()
    found = {each["index"]: each["relevance_score"] for each in reply["results"]}
    words = [llm.get_tokenizer().encode(word, add_special_tokens=False)[0] for word in judging.ANSWERS]
    for index, document in enumerate(documents):
        ids = judge_prompts(llm, [("gorge", document)], "Explain")[0]
        text = llm.get_tokenizer().decode(list(ids))
        assert f"<Instruct>: Explain\n<Query>: gorge\n<Document>: {document}" in text
        llm.runner.open(77, ())
        assert llm.runner.reserve(77, len(ids))
        logits = llm.runner.forward([Segment(77, ids, logits_from=len(ids) - 1)]).logits_RV[0]
        llm.runner.release(77)
        assert found[index] == pytest.approx(float(torch.softmax(logits[words].double(), 0)[0]), abs=1e-6)
    scores = client.post("/v1/score", json={"text_1": "gorge", "text_2": documents, **_only(body)}).json()["data"]
    assert [each["score"] for each in scores] == [found[0], found[1]]


def _only(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("score_by", "instruction")}


MANY = {"input": ["one two three four " * 100] * 1000}


@pytest.mark.parametrize("path", ["embeddings", "rerank"])
def test_a_client_that_leaves_ends_its_request(
    make_app: Callable[..., FastAPI], serve: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Of a thousand texts, each of which has a step of its own, most are never read."""
    steps, step = list[int](), Reading.step

    def slowly(self: Reading) -> None:
        steps.append(1)
        time.sleep(0.005)
        step(self)

    monkeypatch.setattr(Reading, "step", slowly)
    app, body = make_app(), MANY if path == "embeddings" else {"query": "x", "documents": MANY["input"]}
    with serve(app) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/{path}", json=body, timeout=0.5)
        until = time.monotonic() + 600
        while app.state.limiter.active and time.monotonic() < until:
            time.sleep(0.01)
        assert not app.state.limiter.active
    assert sum(steps) < 800, "not all"


def test_a_request_that_takes_too_long_is_ended_and_says_so(make_app: Callable[..., FastAPI]) -> None:
    answer = TestClient(make_app(request_timeout=0.2)).post("/v1/embeddings", json=MANY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")


def test_those_who_decode_wait_for_one_forward_at_a_time(
    make_app: Callable[..., FastAPI], engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many requests have texts read meanwhile."""
    done: list[str] = []
    read, step = Pooled.step, engine.llm.engine.step

    def reading(self: Pooled, rows: int) -> None:
        done.append("read")
        read(self, rows)

    def stepping() -> Any:
        done.append("step")
        return step()

    monkeypatch.setattr(Pooled, "step", reading)
    monkeypatch.setattr(engine.llm.engine, "step", stepping)

    async def ask() -> None:
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            texts = {"input": ["one two three four " * 60] * 8}
            asked = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
            decoding = asyncio.create_task(client.post("/v1/completions", json=asked))
            while "step" not in done:
                await asyncio.sleep(0.001)
            answers = await asyncio.gather(*(client.post("/v1/embeddings", json=texts) for _ in range(6)))
            assert [answer.status_code for answer in answers] == [200] * 6
            assert not decoding.done(), "it goes on all the time"
            decoding.cancel()
            while engine.stats().running:
                await asyncio.sleep(0.001)

    asyncio.run(ask())
    between = "".join(word[0] for word in done).strip("r").split("s")
    assert sum(map(len, between)) > 4
    assert max(map(len, between)) <= 2
