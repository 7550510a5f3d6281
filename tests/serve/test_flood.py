"""Many large bodies at once: they are refused early or wait their turn, and the server answers others meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import parlay.text.tokenize
from parlay.aio import AsyncLLM
from parlay.serve.guard.workers import FairQueue
from parlay.text.tokenize import Encoder, PromptTooLong, encode


def _worst_health(address: str, posting: Sequence[threading.Thread]) -> float:
    """The most computing of this process, in seconds of a core, that came before an answer of /health."""
    connection, worst = http.client.HTTPConnection(address, timeout=600), 0.0
    while any(thread.is_alive() for thread in posting):
        began = time.process_time()
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        worst = max(worst, time.process_time() - began)
        time.sleep(0.005)
    return worst


def _post(address: str, path: str, body: bytes, replies: list[int]) -> None:
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    replies.append(connection.getresponse().status)


@pytest.mark.parametrize(
    ("count", "body"),
    [
        (48, b'{"model": "parlay-mini", "prompt": "' + b"The quick brown fox. " * 20_000 + b'"}'),
        (16, b'{"model": "parlay-mini", "prompt": "' + b"The quick brown fox. " * 5_000 + b'"}'),
        (6, b'{"model": "parlay-mini", "prompt": [7' + b", 7" * 1_000_000 + b"]}"),
    ],
    ids=["certainly too long", "encoded", "ids"],
)
def test_health_does_not_wait_for_the_work_on_large_bodies(
    make_app: Callable[..., FastAPI], serve: Callable[[FastAPI], AbstractContextManager[str]], count: int, body: bytes
) -> None:
    """Computing is counted, not time, for other programs may use the machine. All bodies together take far more."""
    replies: list[int] = []
    began = time.process_time()
    with serve(make_app()) as url:
        address = url.removeprefix("http://")
        threads = [
            threading.Thread(target=_post, args=(address, "/v1/completions", body, replies)) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        worst = _worst_health(address, threads)
    assert replies == [400] * count
    assert worst < max(1.0, 0.75 * (time.process_time() - began)), "a second, or on a slow machine a part of the whole"


def test_what_is_certainly_too_long_is_not_encoded(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was encoded")

    monkeypatch.setattr("parlay.text.tokenize.encode", refuse)
    with pytest.raises(PromptTooLong, match="tokens or more, and this model holds 4096: shorten it"):
        Encoder(engine.llm.tokenizer).encode("word " * 100_000, 4096)


SAID = [{"role": "user", "content": "word " * 100_000}]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/completions", {"prompt": "word " * 100_000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "word " * 100_000]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": SAID}, "messages"),
        ("/v1/responses", {"input": "word " * 100_000}, "input"),
        ("/v1/messages", {"messages": SAID, "max_tokens": 1}, "messages"),
        ("/v1/responses/input_tokens", {"input": "word " * 100_000}, "input"),
        ("/v1/messages/count_tokens", {"messages": SAID}, "messages"),
        ("/api/chat", {"messages": SAID}, "messages"),
        ("/api/generate", {"prompt": "word " * 100_000}, "prompt"),
    ],
)
def test_every_api_refuses_too_many_bytes_before_they_are_encoded(
    make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], named: str
) -> None:
    encode_others = parlay.text.tokenize.encode

    def refuse(tokenizer: Any, text: str, *, special: bool) -> list[int]:
        assert len(text) < 100_000, "it was encoded"
        return encode_others(tokenizer, text, special=special)

    monkeypatch.setattr("parlay.text.tokenize.encode", refuse)
    reply = TestClient(make_app()).post(path, json=fields)
    assert reply.status_code == 400
    assert "this model holds 4096: shorten it" in reply.text
    if path.startswith("/v1/c") or path == "/v1/responses":
        assert reply.json()["error"]["param"] == named


@pytest.mark.parametrize("text", ["Hello <|end|> you\n  é😀", "a" * 1000, " ", "tail "])
@pytest.mark.parametrize("special", [True, False])
def test_encoding_beside_other_threads_changes_no_id(engine: AsyncLLM, text: str, special: bool) -> None:
    tokenizer = engine.llm.tokenizer
    assert encode(tokenizer, text, special=special) == tokenizer.encode(text, add_special_tokens=special)


def test_owners_that_wait_take_turns() -> None:
    order: list[str] = []

    async def work(queue: FairQueue, owner: str) -> None:
        async with queue.place(owner):
            order.append(owner)
            await asyncio.sleep(0)

    async def main() -> None:
        queue = FairQueue(1)
        tasks = [asyncio.create_task(work(queue, "greedy")) for _ in range(6)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(work(queue, "modest")) for _ in range(2)]
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(300), queue.place("last"):
            pass

    asyncio.run(main())
    assert sorted(order) == ["greedy"] * 5 + ["modest"] * 2  # one was cancelled while it waited
    assert order.index("modest") <= 3
    assert order[-1] == "greedy"


def test_large_bodies_that_wait_are_bounded_for_each_key(
    make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parlay.serve.guard.workers._HEAVY_WAITING", 0)
    body: dict[str, Any] = {"model": "parlay-mini", "prompt": "x" * 50_000}
    reply = TestClient(make_app()).post("/v1/completions", json=body)
    assert reply.status_code == 429
    assert "Retry-After" in reply.headers
