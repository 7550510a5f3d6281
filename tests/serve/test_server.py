"""A server that is told to stop finishes what it has begun."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from parlay.aio import AsyncLLM
from parlay.serve.app import create_app
from parlay.serve.server import Server
from parlay.serve.settings import Settings

DEADLINE = 300  # seconds after which a test fails rather than waits


class Draining:
    """An engine that is closed when the requests of its application are over, or the time for it is."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.llm = engine.llm
        self.alive = True
        self.app: FastAPI | None = None

    async def close(self, drain_seconds: float | None = None) -> None:
        assert self.app is not None
        assert drain_seconds is not None
        try:
            async with asyncio.timeout(drain_seconds):
                while self.app.state.limiter.active:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self.app.state.go_on.set()


@contextmanager
def running(
    engine: AsyncLLM, drain_seconds: float, *, access_log: bool = False
) -> Iterator[tuple[Server, threading.Thread, str]]:
    """A server on a free port, with an operation that says "one", waits for ``go_on``, and says "two"."""
    draining = Draining(engine)
    draining.app = app = create_app({"mini": draining}, Settings(drain_seconds=drain_seconds))
    app.state.go_on = threading.Event()
    app.openapi_schema = {"paths": {}}  # to describe it takes longer than all else here

    @app.post("/slow")
    async def slow() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield "one"
            while not app.state.go_on.is_set():
                await asyncio.sleep(0.01)
            yield "two"

        return StreamingResponse(parts())

    ready = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(app, ready.set, access_log=access_log)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert ready.wait(DEADLINE)
        yield server, thread, f"http://127.0.0.1:{listener.getsockname()[1]}"
        app.state.go_on.set()
        server.should_exit = True
        thread.join(DEADLINE)


def wait_until_not_ready(url: str) -> None:
    while httpx.get(f"{url}/ready").status_code == 200:
        pass


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])
def test_a_stream_under_way_ends_well_and_latecomers_are_told(signals: list[int], engine: AsyncLLM) -> None:
    """A terminal that closes sends its signal twice."""
    with running(engine, drain_seconds=DEADLINE) as (server, thread, url):
        with httpx.stream("POST", f"{url}/slow", timeout=DEADLINE) as response:
            parts = response.iter_text()
            assert next(parts) == "one"
            for each in signals:
                server.handle_exit(each, None)
            wait_until_not_ready(url)
            late = httpx.post(f"{url}/slow")
            assert (late.status_code, late.headers["Retry-After"]) == (503, "1")
            assert httpx.get(f"{url}/health").status_code == 200
            server.config.app.state.go_on.set()
            assert "".join(parts) == "two"
        thread.join(DEADLINE)
        assert not thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_closes_ends_a_server_unless_nohup_keeps_it(nohup: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    server = Server(FastAPI(), lambda: None, access_log=False)
    with server.capture_signals():
        heard = signal.getsignal(signal.SIGHUP) == server.handle_exit
    assert heard is not nohup


def test_the_wait_has_an_end(engine: AsyncLLM) -> None:
    with running(engine, drain_seconds=0.1) as (server, thread, url):
        with httpx.stream("POST", f"{url}/slow", timeout=DEADLINE) as response:
            parts = response.iter_text()
            assert next(parts) == "one"
            server.handle_exit(signal.SIGINT, None)
            assert "".join(parts) == "two"  # what the closed engine lets the stream say
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_a_second_signal_does_not_wait(engine: AsyncLLM) -> None:
    with (
        running(engine, drain_seconds=DEADLINE) as (server, thread, url),
        httpx.stream("POST", f"{url}/slow", timeout=DEADLINE) as response,
    ):
        assert next(response.iter_text()) == "one"
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
        thread.join(DEADLINE / 3)
        assert not thread.is_alive()


def test_nobody_waits_for_the_rest_of_a_body(engine: AsyncLLM) -> None:
    with running(engine, drain_seconds=0.1) as (server, thread, url):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            client.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
            app = server.config.app
            while not app.state.limiter.active:
                time.sleep(0.01)
            server.handle_exit(signal.SIGTERM, None)
            head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in head
        assert json.loads(body)["error"]["type"] == "overloaded_error"  # Anthropic's shape
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_a_request_that_is_given_up_hears_why(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.serve.graceful._LAST_WORDS", 0.1)
    with running(engine, drain_seconds=0) as (server, thread, url):
        asked = threading.Event()

        @server.config.app.post("/endless")
        async def endless() -> None:
            asked.set()
            await asyncio.Event().wait()

        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{url}/endless", timeout=DEADLINE)
            assert asked.wait(DEADLINE)
            server.handle_exit(signal.SIGTERM, None)
            assert (answer.result().status_code, answer.result().headers["Retry-After"]) == (503, "1")
            assert answer.result().json()["error"]["code"] == "unavailable"
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_the_access_log_has_no_values_of_a_url(engine: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    """A client may write its key there, though the server reads keys from headers alone."""
    with running(engine, drain_seconds=0, access_log=True) as (_, _, url), caplog.at_level("INFO", "uvicorn.access"):
        httpx.get(f"{url}/v1/models?api_key=sk-secret&model=&x=1")
        httpx.get(f"{url}/v1/models?sk-secret")
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert [line.partition(" - ")[2] for line in lines] == [
        '"GET /v1/models?api_key=***&model=&x=*** HTTP/1.1" 200',
        '"GET /v1/models?*** HTTP/1.1" 200',
    ]


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_probes_are_logged_at_level_debug(engine: AsyncLLM, caplog: pytest.LogCaptureFixture, level: str) -> None:
    """A gateway, or what watches containers, asks each second."""
    with running(engine, drain_seconds=0, access_log=True) as (_, _, url), caplog.at_level(level, "uvicorn.access"):
        caplog.clear()
        for path in ("/ready", "/health?x=1", "/v1/models"):
            httpx.get(url + path)
    found = {record.getMessage().split()[3]: record.levelname for record in caplog.records if "GET" in str(record.args)}
    probes = {"/ready": "DEBUG", "/health?x=***": "DEBUG"} if level == "DEBUG" else {}
    assert found == {**probes, "/v1/models": "INFO"}
