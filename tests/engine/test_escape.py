"""A lossy text whose running score would fall below its floor goes on exactly, and no step before was that bad."""

from __future__ import annotations

import pytest
import torch

from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.sampling.rules.lossy import Unverified
from parlay.testing import toy_drafters
from parlay.trees import chain
from parlay.types import (
    Draft,
    Escape,
    Event,
    Exactness,
    NoiseKey,
    Request,
    SamplingParams,
    SequenceView,
    Strategy,
)
from tests.engine.toy_engine import ANSWER, LOGITS, PLAIN, VOCAB, committed, engine

PROMPT = (1, 2, 3)


def request(temperature: float = 0.0) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=24)
    return Request(id="one", prompt=PROMPT, params=params, key=NoiseKey(7))


def often_wrong(view: SequenceView, budget: int) -> Draft:
    """Right, but for every third position."""
    path: list[int] = []
    for _ in range(min(budget, 2)):
        token = ANSWER(view, path)
        path.append(token if (len(view.tokens) + len(path)) % 3 else (token + 1) % VOCAB)
    return chain(path, "toy")


def decoded(strategy: Strategy, asked: Request) -> tuple[list[int], Event]:
    target, events = engine(), []
    target.add(asked, strategy)
    while not target.idle:
        events += target.step()
    return committed(events), events[-1]


def strategy(floor: float) -> Strategy:
    drafter = toy_drafters.ToyDrafter(often_wrong)
    return Strategy("toy", (drafter,), Unverified(), Fixed(2), Escape(floor, SharedNoise()) if floor else None)


def scores(tokens: list[int]) -> list[float]:
    """The running score after each token."""
    ratios, text = [], list(PROMPT)
    for token in tokens:
        logits_V = LOGITS(text)
        ratios.append(float(torch.exp(logits_V[token] - logits_V.max())))
        text.append(token)
    return [sum(ratios[:count]) / count for count in range(1, len(ratios) + 1)]


@pytest.mark.parametrize("floor", [0.85, 0.9, 0.99])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_goes_on_exactly_before_its_score_would_fall_below_the_floor(floor: float, temperature: float) -> None:
    tokens, last = decoded(strategy(floor), request(temperature))
    assert last.metrics is not None
    left = last.metrics.escaped_at
    assert left is not None
    lossy, exact = tokens[:left], tokens[left:]
    assert not lossy or scores(lossy)[-1] >= floor
    target = engine()
    rest = Request(
        id="rest",
        prompt=(*PROMPT, *lossy),
        params=SamplingParams(temperature=temperature, max_tokens=len(exact)),
        key=NoiseKey(7),  # noise is keyed by position, so a prompt that holds the lossy part goes on alike
    )
    target.add(rest, PLAIN)
    events: list[Event] = []
    while not target.idle:
        events += target.step()
    assert committed(events) == exact
    assert last.metrics.exactness is Exactness.LOSSY


def test_a_text_that_stays_above_the_floor_never_escapes() -> None:
    without, _ = decoded(strategy(0.0), request())
    lowest = min(scores(without))
    tokens, last = decoded(strategy(lowest * 0.99), request())
    assert tokens == without
    assert last.metrics is not None
    assert last.metrics.escaped_at is None


def test_with_a_floor_of_one_the_greedy_text_is_that_of_plain_decoding() -> None:
    assert decoded(strategy(1.0), request())[0] == decoded(PLAIN, request())[0]
