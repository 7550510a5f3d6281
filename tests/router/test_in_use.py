"""``auto`` with the built-in model, where drafters fail and clocks jump: the text and the figures stay sound."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from parlay import LLM, SamplingParams
from parlay.engine import Engine
from parlay.llm.outputs import CompletionOutput
from parlay.types import Routed
from tests.router.faulty import CLOCK, Clock

PARAMS = SamplingParams(max_tokens=160, temperature=0.0, ignore_eos=True)
FAULTY = "tests.router.faulty:Faulty"


def decode(strategy: str) -> CompletionOutput:
    with LLM("parlay-mini", strategy=strategy, router_memory="off") as llm:
        (output,) = llm.generate("one two three one two three one two three one two", PARAMS)
    return output.outputs[0]


@pytest.fixture(scope="module")
def plain() -> tuple[int, ...]:
    return decode("none").token_ids


def of_faulty(output: CompletionOutput) -> Routed:
    assert output.metrics.router is not None
    (routed,) = output.metrics.router.drafters
    return routed


def test_a_drafter_that_raises_midway_is_asked_no_more_and_the_text_is_the_same(plain: tuple[int, ...]) -> None:
    output = decode(f"auto:of={FAULTY}(raises=12)")
    assert output.token_ids == plain
    assert of_faulty(output).asked == 13
    assert output.metrics.drafter_faults == 1


def test_a_drafter_that_becomes_slow_midway_is_dropped_within_two_steps_but_for_trials(
    plain: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parlay.llm.resources.Engine", partial(Engine, clock=CLOCK))
    assert of_faulty(decode(f"auto:of={FAULTY}")).asked > 30
    output = decode(f"auto:of={FAULTY}(slows=12)")
    assert output.token_ids == plain
    assert of_faulty(output).asked <= 12 + 2 + of_faulty(output).trials
    assert of_faulty(output).trials <= 2


@pytest.mark.parametrize("jump", [lambda draw: -5.0, lambda draw: 7200.0, lambda draw: draw.choice((-3600.0, 7200.0))])
def test_a_clock_that_jumps_changes_no_text_and_makes_no_figure_absurd(
    plain: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, jump: Callable[[random.Random], float]
) -> None:
    draw, clock = random.Random(0), Clock()

    def jumping() -> float:
        clock.added += jump(draw) if draw.random() < 0.02 else 0.0
        return clock()

    monkeypatch.setattr("parlay.llm.resources.Engine", partial(Engine, clock=jumping))
    with LLM("parlay-mini", strategy="auto", router_memory="off") as llm:
        outputs = [llm.generate("one two three one two three one two three", PARAMS)[0].outputs[0] for _ in range(3)]
    assert clock.added != 0
    for output in outputs:
        assert output.token_ids == outputs[0].token_ids
        metrics, router = output.metrics, output.metrics.router
        assert router is not None
        parts = (metrics.prefill_seconds, metrics.draft_seconds, metrics.verify_seconds, metrics.overhead_seconds)
        for seconds in (*parts, *(each.seconds for each in router.drafters)):
            assert 0 <= seconds < 600
