"""A client gets no more than the server gives: bytes, time, requests at once, samples, tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from parlay.llm.request_options import RequestOptions
from parlay.serve import middleware
from parlay.serve.errors import ApiError
from parlay.serve.middleware import BodyBytes
from parlay.serve.protocol.sampling_from_body import check_prompt, limit_params
from parlay.serve.settings import PROMPT_LOG, Settings
from parlay.types import SamplingParams
from tests.system.late import late_answers

MakeApp = Callable[..., FastAPI]
JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "x"}


def test_an_announced_body_that_is_too_large_is_a_413(make_app: MakeApp) -> None:
    client = TestClient(make_app(max_body_bytes=100))
    assert client.post("/tokenize", json={"prompt": "x" * 50}).status_code == 200
    refused = client.post("/tokenize", json={"prompt": "x" * 100})
    assert refused.status_code == 413
    assert "100 bytes" in refused.json()["error"]["message"]


def test_a_streamed_body_is_counted_as_it_comes(make_app: MakeApp) -> None:
    sent: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            sent.append(40)
            yield b"x" * 40

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(max_body_bytes=100))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/tokenize", content=endless(), headers=JSON)

    assert asyncio.run(ask()).status_code == 413
    assert len(sent) == 3


def test_a_length_that_is_a_lie_or_no_number_does_no_harm(make_app: MakeApp) -> None:
    client = TestClient(make_app(max_body_bytes=100), raise_server_exceptions=False)
    for length, status in (("9" * 5000, 413), ("-1", 200), ("\u0664", 200), ("x", 200)):
        headers = {**JSON, "Content-Length": length.encode()}
        assert client.post("/tokenize", content=b'{"prompt": "x"}', headers=headers).status_code == status


def test_a_body_that_does_not_arrive_is_a_408(make_app: MakeApp) -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(body_timeout=0.05))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/tokenize", content=stalled(), headers=JSON)

    assert asyncio.run(ask()).status_code == 408


def test_requests_at_once_are_limited_and_the_rest_still_answers(make_app: MakeApp) -> None:
    app = make_app(concurrency=2, retry_after=5)
    go_on = asyncio.Event()

    @app.post("/wait")
    async def wait(request: Request) -> str:
        await go_on.wait()
        return "done"

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            running = [asyncio.create_task(client.post("/wait")) for _ in range(2)]
            while app.state.limiter.active < 2:
                await asyncio.sleep(0)
            third = await client.post("/wait")
            assert (third.status_code, third.headers["Retry-After"]) == (429, "5")
            assert third.json()["error"]["type"] == "rate_limit_error"
            assert (await client.get("/health")).status_code == 200
            go_on.set()
            assert [(await task).status_code for task in running] == [200, 200]
            assert (await client.post("/wait")).status_code == 200

    asyncio.run(ask())
    assert app.state.limiter.active == 0


def test_large_bodies_under_way_are_bounded_together_and_small_ones_pass(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "_LARGEST", 1)
    app = make_app(max_body_bytes=100_000)
    go_on, arrived = asyncio.Event(), asyncio.Event()

    @app.post("/wait")
    async def wait(request: Request) -> str:
        arrived.set()
        await go_on.wait()
        return "done"

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            first = asyncio.create_task(client.post("/wait", content=b"x" * 60_000))
            await arrived.wait()
            assert (await client.post("/wait", content=b"x" * 60_000)).status_code == 429
            small = asyncio.create_task(client.post("/wait", content=b"x" * 30_000))
            go_on.set()
            assert [(await task).status_code for task in (first, small)] == [200, 200]
            assert (await client.post("/wait", content=b"x" * 60_000)).status_code == 200

    asyncio.run(ask())


def test_a_key_has_half_of_the_room_for_large_bodies() -> None:
    room = BodyBytes(100)
    room.take("greedy", 50)
    with pytest.raises(ApiError, match="50 bytes"):
        room.take("greedy", 1)
    room.take("modest", 50)
    room.give_back("greedy", 50)
    room.take("greedy", 1)


def test_a_request_that_fails_gives_its_place_back(make_app: MakeApp) -> None:
    app = make_app(concurrency=1)

    @app.post("/fail")
    async def fail() -> None:
        raise RuntimeError("a bug")

    client = TestClient(app, raise_server_exceptions=False)
    assert [client.post("/fail").status_code for _ in range(3)] == [500, 500, 500]


def test_prompts_are_logged_only_where_that_is_asked_for(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        TestClient(make_app()).post("/tokenize", json={"prompt": "a secret"})
        assert "a secret" not in caplog.text
        TestClient(make_app(log_prompts=True)).post("/tokenize", json={"prompt": "a secret"})
    assert [record.name for record in caplog.records if "a secret" in record.getMessage()] == [PROMPT_LOG]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"n": 5}, "n"),
        ({"max_tokens": 11}, "max_tokens"),
        ({"n": 5, "max_tokens": 11}, "n"),
        ({"min_tokens": 11, "max_tokens": None}, "min_tokens"),
    ],
)
def test_too_many_samples_or_tokens_name_their_field(given: dict[str, int | None], param: str) -> None:
    with pytest.raises(ApiError, match=param) as caught:
        limit_params(SamplingParams(**given), Settings(max_n=4, max_tokens=10))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_hot_temperature_is_logged_once_for_each_value(caplog: pytest.LogCaptureFixture) -> None:
    """A client that asks for it with each request does not fill the log."""
    for temperature in (2.75, 2.75, 3.25, 2.75):
        limit_params(SamplingParams(temperature=temperature), Settings())
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "temperature is 2.75",
        "temperature is 3.25",
    ]


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/completions", {"prompt": "One", "max_tokens": None}, "completion_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "completion_tokens"),
        ("/v1/responses", {"input": "Hi"}, "output_tokens"),
        ("/api/generate", {"prompt": "Hi", "stream": False}, "eval_count"),
    ],
)
def test_an_output_without_a_limit_ends_at_the_servers(
    make_app: MakeApp, path: str, body: dict[str, object], tokens: str
) -> None:
    for settings in ({"default_max_tokens": 4}, {"max_tokens": 4}):
        reply = TestClient(make_app(**settings)).post(path, json=body).json()
        assert 0 < (reply.get("usage") or reply)[tokens] <= 4


def test_a_client_raises_the_default_end_up_to_the_most(make_app: MakeApp) -> None:
    client = TestClient(make_app(default_max_tokens=3, max_tokens=8))
    body = {"prompt": "One", "ignore_eos": True}
    for wanted, got in (({"max_tokens": None}, 3), ({}, 8), ({"max_tokens": 8}, 8)):
        choice = client.post("/v1/completions", json=body | wanted).json()
        assert (choice["usage"]["completion_tokens"], choice["choices"][0]["finish_reason"]) == (got, "length")
    assert client.post("/v1/completions", json=body | {"max_tokens": 9}).status_code == 400


def test_the_default_end_is_no_more_than_the_model_holds(engine: AsyncLLM) -> None:
    job = engine.llm.job("One", SamplingParams(max_tokens=None), RequestOptions(default_max_tokens=10**9))
    asked = job.samples[0].request
    assert asked.params.max_tokens == engine.llm.engine.longest - len(asked.prompt)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_a_temperature_above_openais_is_refused_there(make_app: MakeApp, path: str, body: dict[str, object]) -> None:
    reply = TestClient(make_app()).post(path, json={**body, "temperature": 2.5})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["message"]) == ("temperature", "temperature must be at most 2, got 2.5")


def test_an_empty_list_of_prompts_is_refused_in_plain_words(make_app: MakeApp) -> None:
    reply = TestClient(make_app()).post("/v1/completions", json={"prompt": []})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "prompt must hold at least 1 item, got 0"


def test_a_temperature_above_the_usual_is_warned_of_elsewhere(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "x", "stream": False, "options": {"temperature": 2.625, "num_predict": 1}}
    assert TestClient(make_app()).post("/api/generate", json=body).status_code == 200
    assert "temperature is 2.625: above 2" in caplog.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "guided_json": {"properties": {"asked_by_no_other_test": {}}}}),
        ("/v1/chat/completions", {"messages": [USER], "guided_regex": "(b|c)d{2,3}(e|f)"}),
        ("/api/chat", {"messages": [USER], "format": {"properties": {"asked_by_nobody_else": {}}}}),
    ],
)
def test_a_machine_too_busy_to_compile_a_form_is_not_the_clients_fault(
    make_app: MakeApp, path: str, body: dict[str, object]
) -> None:
    with late_answers():
        reply = TestClient(make_app(retry_after=7)).post(path, json=body)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "7")
    assert "on a busy machine: try again" in reply.text


def test_a_long_prompt_has_openais_code() -> None:
    check_prompt(10, Settings(max_prompt_tokens=10))
    check_prompt(10**9, Settings())
    with pytest.raises(ApiError, match="11 tokens") as caught:
        check_prompt(11, Settings(max_prompt_tokens=10), "messages")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 5000}]}),
        ("/v1/responses", {"input": "word " * 5000}),
        ("/v1/completions", {"prompt": "word " * 5000}),
        ("/v1/messages", {"max_tokens": 8, "messages": [{"role": "user", "content": "word " * 5000}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "word " * 5000}]}),
    ],
)
def test_a_prompt_beyond_the_context_has_the_words_at_which_agents_shorten_it(
    client: TestClient, path: str, body: dict[str, object]
) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith("prompt is too long: ")
    assert "tokens" in message


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_n": 0},
        {"concurrency": -1},
        {"max_body_bytes": 0},
        {"request_timeout": 0.0},
        {"drain_seconds": -1.0},
        {"request_timeout": float("nan")},
        {"drain_seconds": float("nan")},
        {"max_tokens": 0},
    ],
)
def test_a_limit_out_of_range_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)
