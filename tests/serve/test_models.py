"""Several models: loaded when they are asked for, unloaded when nobody uses them, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import Request
from starlette.testclient import TestClient

from parlay import LLM
from parlay.aio import AsyncLLM
from parlay.serve.app import create_app, shut_down
from parlay.serve.hosted import ModelLoader
from parlay.serve.registry import Registry
from parlay.serve.settings import Settings
from parlay.types import RunnerLost

PROMPT = "The tide turns twice a day, and the ferry"


class Loads:
    """Loads the small model as soon as ``go_on`` is set, and keeps count."""

    def __init__(self) -> None:
        self.count = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.failure: Exception | None = None
        self.step_seconds = 0.0
        """By which each step of an engine takes longer."""
        self.engines: list[weakref.ref[AsyncLLM]] = []
        self.runners: list[weakref.ref[object]] = []

    def __call__(self) -> AsyncLLM:
        self.count += 1
        assert self.go_on.wait(600)
        if self.failure is not None:
            raise self.failure
        engine = AsyncLLM.load(lambda: LLM("parlay-mini", memory="64MiB"))
        if self.step_seconds:
            step, seconds = engine.llm.engine.step, self.step_seconds
            engine.llm.engine.step = lambda: (time.sleep(seconds), step())[1]  # type: ignore[method-assign]
        self.engines.append(weakref.ref(engine))
        self.runners.append(weakref.ref(engine.llm.runner))
        return engine


@contextmanager
def hosting(models: dict[str, Loads], **settings: Any) -> Iterator[httpx.Client]:
    config = uvicorn.Config(create_app(dict(models), Settings(**settings)), port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def ask(client: httpx.Client, model: str, tokens: int = 8, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    return client.post("/v1/completions", json=body)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def status(client: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["status"] for model in client.get("/v1/models").json()["data"]}


def until(condition: Callable[[], bool], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_model_is_loaded_when_it_is_first_asked_for() -> None:
    loads = {"one": Loads(), "two": Loads()}
    with hosting(loads) as client:
        assert status(client) == {"one": "unloaded", "two": "unloaded"}
        assert client.get("/v1/models/one").json()["max_model_len"] is None
        text(ask(client, "one"))
        assert status(client) == {"one": "loaded", "two": "unloaded"}
        assert client.get("/v1/models/one").json()["max_model_len"] > 0
        assert client.post("/tokenize", json={"model": "two", "prompt": "a"}).json()["count"] > 0
    assert [load.count for load in loads.values()] == [1, 1]


def test_requests_that_come_while_it_loads_wait_for_one_load_and_health_answers() -> None:
    loads = Loads()
    loads.go_on.clear()
    with hosting({"one": loads}) as client, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, client, "one") for _ in range(8)]
        until(lambda: loads.count == 1)
        assert client.get("/health").status_code == 200
        assert not any(answer.done() for answer in answers)
        loads.go_on.set()
        assert len({text(answer.result()) for answer in answers}) == 1
    assert loads.count == 1


def engine_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "parlay-engine"}


def test_a_model_that_cannot_be_loaded_is_one_clear_error_and_the_server_lives() -> None:
    good, bad, before = Loads(), Loads(), engine_threads()
    bad.failure = FileNotFoundError("no config.json in /srv/secret")
    with hosting({"good": good, "bad": bad}) as client, ThreadPoolExecutor(4) as pool:
        for answer in [pool.submit(ask, client, "bad") for _ in range(4)]:
            assert answer.result().status_code == 503
            error = answer.result().json()["error"]
            assert (error["code"], error["param"]) == ("model_load_failed", "model")
            assert error["message"] == "model bad can't be loaded; the server's log says why"
        assert bad.count == 1
        assert status(client)["bad"] == "unloaded"
        assert client.get("/health").status_code == 200
        text(ask(client, "good"))
    until(lambda: not engine_threads() - before)


def test_who_waits_for_a_model_when_the_server_closes_is_told_at_once() -> None:
    loads = {"one": Loads(), "two": Loads()}
    for each in loads.values():
        each.go_on.clear()
    app = create_app(dict(loads), Settings())

    async def closed() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"prompt": PROMPT, "max_tokens": 1}
            asked = [
                asyncio.create_task(client.post("/v1/completions", json={"model": name, **body})) for name in loads
            ]
            while not loads["one"].count:
                await asyncio.sleep(0.01)
            await shut_down(app)
            answers = await asyncio.gather(*asked)
            loads["one"].go_on.set()
            loading = [model.task for model in app.state.registry if model.task is not None]
            await asyncio.wait_for(asyncio.gather(*loading), 600)
            return answers

    for answer in asyncio.run(closed()):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert loads["two"].count == 0  # it was next, and nobody waits for it any more


def test_a_request_that_has_a_model_when_the_server_closes_may_use_it(engine: AsyncLLM) -> None:
    """Its jobs come later than the signal: a long prompt takes time to encode, and some answers are several rounds."""

    class Watched(AsyncLLM):
        alive = True

        def __init__(self) -> None:
            self.llm = engine.llm
            self.closed_after: list[float | None] = []

        async def close(self, drain_seconds: float | None = None) -> None:
            self.closed_after.append(drain_seconds)

    async def closing(drain_seconds: float) -> float | None:
        registry, request = Registry({"one": (llm := Watched())}), Request({"type": "http", "state": {"in_use": []}})
        await registry.use("one", request)
        task = asyncio.create_task(registry.close(drain_seconds))
        await asyncio.sleep(0.01)
        if drain_seconds:
            assert not llm.closed_after
            request.state.in_use.pop().leave()
        await task
        return llm.closed_after.pop()

    assert 0 < (asyncio.run(closing(600)) or 0) < 600
    assert asyncio.run(closing(0)) == 0


def test_a_step_that_does_not_end_keeps_no_server_from_ending(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that hangs holds the engine's thread."""
    monkeypatch.setattr("parlay.serve.registry._STEP_SECONDS", 0.01)

    class Hanging(AsyncLLM):
        def __init__(self) -> None:
            self.llm = engine.llm

        async def close(self, drain_seconds: float | None = None) -> None:
            await asyncio.Event().wait()

    async def closed() -> None:
        await asyncio.wait_for(Registry({"one": Hanging()}).close(0), 600)

    asyncio.run(closed())
    assert "a step has not ended in 0.01 s" in caplog.text


def test_a_server_that_closes_says_of_no_model_that_it_is_unloaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("parlay.serve.registry._SWEEP_SECONDS", 0.01)

    async def closed() -> None:
        registry = Registry({"one": Loads()})
        registry.load_now("one")
        sweep = asyncio.create_task(registry.sweep())
        await asyncio.sleep(0)
        await registry.close(600)
        await asyncio.wait_for(sweep, 600)

    with caplog.at_level("INFO"):
        asyncio.run(closed())
    assert "is unloaded" not in caplog.text


def test_what_could_not_be_loaded_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.serve.registry._FAILED_SECONDS", 0.2)
    loads = Loads()
    loads.failure = RuntimeError("no room")
    with hosting({"one": loads}) as client:
        assert ask(client, "one").status_code == 503
        loads.failure = None
        time.sleep(0.25)
        text(ask(client, "one"))
    assert loads.count == 2


def server_load(client: httpx.Client) -> int:
    """How many requests are under way."""
    return int(client.get("/load").json()["server_load"])


def test_models_make_room_for_each_other_and_no_request_is_lost() -> None:
    """Twenty-four requests for three models, one in memory at a time, some streamed: all texts are as ever.

    No model but the first is there before all of them have come, so a slow client has none loaded for each request.
    """
    names = ("one", "two", "three")
    loads = {name: Loads() for name in names}
    with hosting(loads, max_loaded=1) as client, ThreadPoolExecutor(24) as pool:
        expected = text(ask(client, "one", 24))
        loads["two"].go_on.clear()
        loads["three"].go_on.clear()
        answers = [pool.submit(ask, client, names[place % 3], 24, stream=place % 2 == 0) for place in range(24)]
        until(lambda: server_load(client) + sum(answer.done() for answer in answers) >= 24)
        loads["two"].go_on.set()
        loads["three"].go_on.set()
        for place, answer in enumerate(answers):
            if place % 2:
                assert text(answer.result()) == expected
            else:
                assert answer.result().text.endswith("data: [DONE]\n\n")
        assert sum(state == "loaded" for state in status(client).values()) == 1
        until(lambda: gc.collect() >= 0 and sum(r() is not None for load in loads.values() for r in load.runners) == 1)
    assert 3 <= sum(load.count for load in loads.values()) <= 12


def test_a_stream_under_way_ends_in_full_though_its_model_is_wanted_away() -> None:
    with hosting({"one": Loads(), "two": Loads()}, max_loaded=1) as client, ThreadPoolExecutor(1) as pool:
        expected = text(ask(client, "one", 400))
        body = {"model": "one", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            other = pool.submit(ask, client, "two")  # this reader is slow, and the other need not wait for it
            text(other.result())
            told = response.read().decode()
        pieces = [httpx.Response(200, text=line[6:]).json() for line in told.splitlines() if line.startswith("data: {")]
        assert "".join(choice["text"] for piece in pieces for choice in piece["choices"]) == expected


def test_an_idle_model_is_unloaded_and_its_memory_freed() -> None:
    loads = Loads()
    with hosting({"one": loads}, idle_seconds=0.05) as client:
        first = text(ask(client, "one"))
        until(lambda: status(client)["one"] == "unloaded")
        assert loads.runners[0]() is None  # nothing but the registry held it
        assert text(ask(client, "one")) == first
        loads.step_seconds = 0.02
        body = {"model": "one", "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": True}
        until(lambda: status(client)["one"] == "unloaded")
        with client.stream("POST", "/v1/completions", json=body) as long:  # for several of the looks for idle models
            lines = long.iter_lines()
            next(lines)
            count = loads.count
            assert [line for line in lines if line][-1] == "data: [DONE]"
            assert loads.count == count


def test_a_model_whose_engine_has_died_is_loaded_again() -> None:
    loads = Loads()
    with hosting({"one": loads}) as client:
        first = text(ask(client, "one"))
        engine = loads.engines[0]()
        assert engine is not None
        engine._worker.close(0).result()
        del engine
        until(lambda: client.get("/health").status_code == 200)
        assert text(ask(client, "one")) == first
    assert loads.count == 2


def test_a_model_that_was_lost_is_not_ready_until_it_has_been_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to ask for it, neither whether it is ready nor for a text."""
    loads, lost = Loads(), list[str]()

    def fail(*_: object) -> None:
        lost.append("rank 1 has ended")
        raise RunnerLost(*lost)

    with hosting({"one": loads}) as client:
        first = text(ask(client, "one"))
        loads.go_on.clear()
        engine = loads.engines[0]()
        assert engine is not None
        monkeypatch.setattr(engine.llm, "loss", lambda: "".join(lost))
        monkeypatch.setattr(engine.llm.runner, "forward", fail)
        del engine
        assert "rank 1 has ended" in ask(client, "one").text
        until(lambda: loads.count == 2)
        answer = client.get("/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "model one is being loaded again: rank 1 has ended" in answer.text
        loads.go_on.set()
        until(lambda: client.get("/ready").status_code == 200)
        assert text(ask(client, "one")) == first
    assert loads.count == 2


def test_the_queue_of_a_model_that_is_not_loaded_is_no_error_in_metrics() -> None:
    with hosting({"one": Loads(), "two": Loads()}) as client:
        text(ask(client, "one"))
        told = client.get("/metrics").text
        assert 'vllm:num_requests_running{engine="0",model_name="one"}' in told
        assert 'vllm:num_requests_running{engine="0",model_name="two"}' not in told


def test_a_model_from_a_file_answers_to_its_name_its_path_and_its_file(engine: AsyncLLM) -> None:
    loader = ModelLoader("models/tiny-Q4.gguf", lambda: engine)
    client = TestClient(create_app({"tiny-Q4": loader, "other": engine}))
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny-Q4", "other"]
    for name in ("tiny-Q4", "tiny-Q4.gguf", "models/tiny-Q4.gguf", "tiny-Q4:latest"):
        reply = client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1})
        assert (reply.status_code, reply.json()["model"]) == (200, "tiny-Q4")
    assert client.post("/v1/completions", json={"model": "iny-Q4", "prompt": "x"}).status_code == 404


def test_a_model_that_is_kept_longer_than_calendars_last_is_told_of() -> None:
    with hosting({"a": Loads()}) as client:
        assert client.post("/api/generate", json={"keep_alive": "99999999999h"}).status_code == 200
        told = client.get("/api/ps")
        assert told.status_code == 200, told.text
        assert told.json()["models"][0]["expires_at"].startswith("9999")
