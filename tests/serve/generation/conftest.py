"""Helpers for the tests of generation: requests and answers, the Python API's answers, and the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import RequestOutput, SamplingParams
from parlay.aio import AsyncLLM
from parlay.text.chat_template import Messages
from parlay.text.prompts import Prompt

Post = Callable[..., Any]
Serve = Callable[[FastAPI], AbstractContextManager[str]]


@pytest.fixture
def post(client: TestClient) -> Post:
    """``post(path, **fields)`` returns the body of an answer, whose status must be 200."""

    def send(path: str, **fields: Any) -> Any:
        answer = client.post(f"/v1/{path}", json={"model": "parlay-mini", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return send


@pytest.fixture
def stream(client: TestClient) -> Post:
    """``stream(path, **fields)`` returns the chunks of a stream, which must end with [DONE]."""

    def send(path: str, **fields: Any) -> list[Any]:
        answer = client.post(f"/v1/{path}", json={"model": "parlay-mini", "stream": True, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    return send


@pytest.fixture
def refusal(client: TestClient) -> Post:
    """``refusal(path, **fields)`` returns the error of a request, which must be refused with 400."""

    def send(path: str, **fields: Any) -> Any:
        answer = client.post(f"/v1/{path}", json={"model": "parlay-mini", **fields})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    return send


@pytest.fixture(scope="session")
def generate(engine: AsyncLLM) -> Callable[..., RequestOutput]:
    """``generate(prompt, params)`` returns the Python API's output of plain decoding."""

    def run(prompt: Prompt | Messages, params: SamplingParams) -> RequestOutput:
        def ask(llm: Any) -> Any:
            ask_one = llm.generate if isinstance(prompt, str | dict) else llm.chat
            return ask_one(prompt, params, strategy="none")[0]

        return asyncio.run(engine.between_steps(ask))

    return run


@pytest.fixture(scope="session")
def question() -> list[dict[str, str]]:
    return [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="session")
def create(make_app: Callable[..., FastAPI], serve: Serve, question: list[dict[str, str]]) -> Iterator[Post]:
    """``create(**fields)`` asks the official client to answer the question at temperature 0."""
    with serve(make_app()) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

        def ask(**fields: Any) -> Any:
            known = {"model": "parlay-mini", "messages": question, "temperature": 0, "max_tokens": 96}
            return client.chat.completions.create(**{**known, **fields})

        yield ask
