"""The built-in model behind the application, spoken to without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import LLM
from parlay.aio import AsyncLLM
from parlay.serve.app import create_app
from parlay.serve.settings import Settings


class Shared(AsyncLLM):
    """Stays open when an application that uses it shuts down."""

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
def make_app(engine: AsyncLLM) -> Callable[..., FastAPI]:
    """``make_app(**settings)``: an application of its own around the one engine."""
    return lambda **settings: create_app({"parlay-mini": engine}, Settings(**settings))


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> TestClient:
    """Answers as a server would: a fault is a 500."""
    return TestClient(make_app(), raise_server_exceptions=False)
