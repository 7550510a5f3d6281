"""The reference decoder ends where it should: stops, lengths, min_tokens, stop strings, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from parlay.testing.reference import decode
from parlay.types import NoiseKey, ParlayError, Request, SamplingParams, StopChecker


def count_up(ids: Sequence[int]) -> torch.Tensor:
    """The next id is the last one plus 1, of 10."""
    return 9.0 * torch.eye(10)[(ids[-1] + 1) % 10]


@dataclass
class StopAt:
    token: int

    def push(self, token: int) -> bool:
        return token == self.token


def request(stop_ids: Sequence[int] = (), checker: StopChecker | None = None, **fields: object) -> Request:
    params = SamplingParams(temperature=0, **fields)  # type: ignore[arg-type]
    return Request(
        id="test", prompt=(0,), params=params, key=NoiseKey(1), stop_ids=frozenset(stop_ids), stop_checker=checker
    )


@pytest.mark.parametrize(
    ("asked", "tokens", "reason"),
    [
        (request(max_tokens=4), [1, 2, 3, 4], "length"),
        (request(max_tokens=0), [], "length"),
        (request([3]), [1, 2, 3], "stop"),
        (request([3], max_tokens=3), [1, 2, 3], "stop"),
        (request([1], min_tokens=1), [0, 1], "stop"),
        (request(checker=StopAt(2)), [1, 2], "stop"),
        (request(checker=StopAt(2), min_tokens=3, max_tokens=4), [1, 2, 3, 4], "length"),
    ],
)
def test_endings(asked: Request, tokens: list[int], reason: str) -> None:
    text = decode(count_up, asked)
    assert (text.output, text.finish_reason) == (tokens, reason)


def test_context_ends_a_text_too() -> None:
    text = decode(count_up, request(max_tokens=None), max_context=6)
    assert (text.tokens, text.finish_reason) == ([0, 1, 2, 3, 4, 5], "length")


def test_logprobs_are_raw_or_processed() -> None:
    raw = decode(count_up, request(logprobs=1, max_tokens=2)).logprobs
    assert [(one.token, one.rank, one.top[0][0]) for one in raw] == [(1, 1, 1), (2, 1, 2)]
    masked = decode(count_up, request(logprobs=0, max_tokens=1, logprobs_mode="processed", allowed_token_ids=[5]))
    assert (masked.output, masked.logprobs[0].logprob) == ([5], 0.0)


def test_broken_logits_are_an_error() -> None:
    with pytest.raises(ParlayError, match="NaN"):
        decode(lambda ids: torch.full((4,), torch.nan), request())
