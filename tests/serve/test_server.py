"""A server that is told to stop finishes what it has begun."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
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


def test_a_stream_under_way_ends_well_and_latecomers_are_told(engine: AsyncLLM) -> None:
    with running(engine, drain_seconds=DEADLINE) as (server, thread, url):
        with httpx.stream("POST", f"{url}/slow", timeout=DEADLINE) as response:
            parts = response.iter_text()
            assert next(parts) == "one"
            server.handle_exit(signal.SIGTERM, None)
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


def test_the_access_log_has_no_values_of_a_url(engine: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    """A client may write its key there, though the server reads keys from headers alone."""
    with running(engine, drain_seconds=0, access_log=True) as (_, _, url), caplog.at_level("INFO", "uvicorn.access"):
        httpx.get(f"{url}/health?api_key=sk-secret&model=&x=1")
        httpx.get(f"{url}/health?sk-secret")
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert [line.partition(" - ")[2] for line in lines] == [
        '"GET /health?api_key=***&model=&x=*** HTTP/1.1" 200',
        '"GET /health?*** HTTP/1.1" 200',
    ]
