"""Predicted outputs through the official client."""

from __future__ import annotations

from typing import Any

import openai

DRAFTING = {"strategy": "prediction:policy=fixed"}
"""The default policy may find, on a busy machine, that drafting does not pay in so short an answer."""


def test_a_prediction_is_counted_whatever_is_made_of_it(create: Any) -> None:
    answer = create(max_tokens=40, prediction={"type": "content", "content": "Never said by this model."})
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


def test_a_prediction_is_drafted_from_and_counted(create: Any) -> None:
    plain = create(max_tokens=40, extra_body={"strategy": "none"}).choices[0].message.content
    answer = create(
        max_completion_tokens=40,
        max_tokens=openai.omit,
        prediction={"type": "content", "content": plain},
        n=2,
        logprobs=True,
        extra_body=DRAFTING,
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
        extra_body=DRAFTING,
    )
    assert last.usage.completion_tokens_details.accepted_prediction_tokens > 0
