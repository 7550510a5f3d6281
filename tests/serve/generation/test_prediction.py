"""Predicted outputs through the official client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from fastapi import FastAPI

MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]
Serve = Callable[[FastAPI], AbstractContextManager[str]]


@pytest.fixture
def create(make_app: Callable[..., FastAPI], serve: Serve) -> Iterator[Callable[..., Any]]:
    """``create(**fields)``: a chat completion at temperature 0."""
    with serve(make_app()) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

        def ask(**fields: Any) -> Any:
            known = {"model": "parlay-mini", "messages": MESSAGES, "temperature": 0, "max_tokens": 96}
            return client.chat.completions.create(**{**known, **fields})

        yield ask


def test_a_prediction_is_drafted_from_and_counted(create: Any) -> None:
    plain = create(max_tokens=40, extra_body={"strategy": "none"}).choices[0].message.content
    answer = create(
        max_completion_tokens=40,
        max_tokens=openai.omit,
        prediction={"type": "content", "content": plain},
        n=2,
        logprobs=True,
    )
    assert [choice.message.content for choice in answer.choices] == [plain, plain]
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens >= 0
    *_, last = create(
        max_tokens=40,
        prediction={"type": "content", "content": [{"type": "text", "text": plain}]},
        stream=True,
        stream_options={"include_usage": True},
    )
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > 0
