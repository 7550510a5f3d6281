"""The built-in model behind the application, spoken to without a network, or on a free port."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any
from weakref import WeakSet

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import LLM
from parlay.aio import AsyncLLM
from parlay.serve.app import Application, create_app
from parlay.serve.settings import Settings


class Shared(AsyncLLM):
    """An AsyncLLM that stays open when an application that uses it shuts down."""

    async def close(self, drain_seconds: float | None = None) -> None:
        pass

    async def end(self) -> None:
        await super().close(0)


@pytest.fixture(scope="session")
def engine() -> Iterator[AsyncLLM]:
    engine = Shared(LLM("parlay-mini"))
    yield engine
    asyncio.run(engine.end())


@pytest.fixture(scope="session")
def make_app(engine: AsyncLLM) -> Iterator[Callable[..., FastAPI]]:
    """``make_app(**settings)`` makes a new application around the shared engine.

    Making an OpenAPI document takes longer than most tests, so applications with the same settings and paths share one.
    """
    ours, described, describe = WeakSet[FastAPI](), list[tuple[object, dict[str, Any]]](), Application.openapi

    def make(**settings: Any) -> FastAPI:
        app = create_app({"parlay-mini": engine}, Settings(**settings))
        ours.add(app)
        return app

    def openapi(app: Application) -> dict[str, Any]:
        if app not in ours:
            return describe(app)
        known = app.state.settings, [getattr(route, "path", "") for route in app.routes]
        if app.openapi_schema is None:
            app.openapi_schema = next((deepcopy(document) for other, document in described if other == known), None)
        if app.openapi_schema is None:
            described.append((known, deepcopy(describe(app))))
        assert app.openapi_schema is not None
        return app.openapi_schema

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Application, "openapi", openapi)
        yield make


@pytest.fixture(scope="module")
def client(make_app: Callable[..., FastAPI]) -> TestClient:
    """Make a client that answers as a server would: an exception is a 500. A module shares one application, because
    making its OpenAPI document is slow."""
    return TestClient(make_app(), raise_server_exceptions=False)


@pytest.fixture
def tell(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """``tell(line)`` prints a long test's progress, with the seconds since it began."""
    began = time.monotonic()

    def show(line: str) -> None:
        with capfd.disabled():
            print(f"\n{time.monotonic() - began:6.0f} s  {line}", end="", flush=True)

    return show


@contextmanager
def listening(app: FastAPI, http: type[asyncio.Protocol] | None = None) -> Iterator[str]:
    """Serve the application on a free port of this machine, and yield its URL; its models stay open afterwards.
    ``http``: the protocol class of its connections."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", http=http or "auto"))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()  # connections made before the server is up wait
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def serve() -> Callable[[FastAPI], AbstractContextManager[str]]:
    return listening
