"""A guided request takes twice the rows of another one, and the engine counts them, in steps and in costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from parlay.engine import Engine, Limits
from parlay.models.ensembles.guided import GuidedRunner
from parlay.models.wrapped_runner import WrappedRunner
from parlay.router.policies import Fixed, Plain
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_SKIP, Guidance, NoiseKey, Output, Request, SamplingParams, Segment, Skip, Strategy

LAW = RandomLogits(12, 3)
PLAINLY = Strategy("toy", (), SharedNoise(), Plain())


class Counting(WrappedRunner):
    """Notes how many rows each forward runs."""

    def __init__(self) -> None:
        super().__init__(ToyRunner(LAW, 12))
        self.rows: list[int] = []

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.rows.append(sum(segment.rows for segment in segments))
        return super().forward(segments, taps, skip)


class Losing(Counting):
    """Goes on without one of two models in the text of a forward's last segment."""

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        return replace(super().forward(segments, taps, skip), lost={segments[-1].sequence: ("other",)})


class Recording(Steady):
    """Notes the rows whose seconds are learned."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def record(self, rows: int, context: int, seconds: float) -> None:
        self.rows.append(rows)


def request(name: str, prompt: Sequence[int], guidance: Guidance | None) -> Request:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return Request(id=name, prompt=tuple(prompt), params=params, key=NoiseKey(1), guidance=guidance)


@pytest.mark.parametrize("negative", [(1, 2, 3, 4, 5, 6, 7, 8, 9, 1), (1,), (1, 2, 3, 4)])
@pytest.mark.parametrize("drafting", [False, True])
def test_no_step_has_more_rows_than_it_may_and_all_are_learned_from(drafting: bool, negative: tuple[int, ...]) -> None:
    """Two guided requests beside another one, with prompts that take several steps, and drafts within their bound.

    Where one row is left, a guided request still gets its two, so that none waits for ever.
    """
    counting, cost = Counting(), Recording()
    guided = GuidedRunner(counting)
    limits = Limits(max_sequences=4, max_rows=8, max_draft_rows=6)
    engine = Engine(guided, cost, limits, guiding=guided)
    drafters = (toy_drafters.oracle(toy_drafters.answer_by(LAW)),) if drafting else ()
    for number, guidance in enumerate((None, *[Guidance(negative, 1.5)] * 2)):
        policy = Fixed(4) if drafting else Plain()
        prompt = [1 + (place + number) % 9 for place in range(10)]
        engine.add(request(str(number), prompt, guidance), Strategy("toy", drafters, SharedNoise(), policy))
    while not engine.idle:
        engine.step()
    assert max(counting.rows) <= 8 + 1 + (6 if drafting else 0)
    assert cost.rows == [rows for rows in counting.rows if rows]


def test_a_prompt_takes_no_second_rows_once_the_negative_prompt_is_read() -> None:
    """Of one token: 40 tokens at 8 rows a step take six steps, where halves of the steps would take eleven."""
    counting = Counting()
    guided = GuidedRunner(counting)
    engine = Engine(guided, Recording(), Limits(max_sequences=1, max_rows=8), guiding=guided)
    asked = request("one", [1 + place % 9 for place in range(40)], Guidance((1,), 1.5))
    engine.add(asked, PLAINLY)
    while not engine.idle:
        engine.step()
    assert counting.rows[:6] == [8, 7, 7, 7, 7, 6]
    assert set(counting.rows[6:]) == {2}


def test_a_long_negative_prompt_is_read_in_steps_while_others_go_on() -> None:
    """Behind a prompt that is cached, too: no step has more rows than it may, and who decodes does so in each step."""
    counting = Counting()
    guided = GuidedRunner(counting)
    engine = Engine(guided, Recording(), Limits(max_sequences=4, max_rows=8), guiding=guided)
    prompt, long = [1, 2, 3, 4, 5, 6, 7, 8], Guidance(tuple(1 + place % 7 for place in range(60)), 1.5)
    texts: list[dict[str, list[int]]] = []
    for names in (["first"], ["alone"], ["again", "other"]):  # each finds the prompt of the ones before it cached
        for name in names:
            engine.add(request(name, prompt, None if name in {"first", "other"} else long), PLAINLY)
        texts.append({name: [] for name in names})
        while not engine.idle:
            steps = len(texts[-1].get("other", []))
            for event in engine.step():
                texts[-1][event.request] += event.committed.tokens
            assert counting.rows[-1] <= 8 + 1
            assert len(texts[-1].get("other", [])) in {steps + 1, 6, 0}
    assert texts[1]["alone"] == texts[2]["again"]


def test_a_model_lost_behind_the_negative_prompt_is_lost_for_the_request() -> None:
    guided = GuidedRunner(Losing())
    engine = Engine(guided, Recording(), Limits(max_sequences=1, max_rows=8), guiding=guided)
    engine.add(request("one", (1, 2, 3), Guidance((4, 5), 1.5)), PLAINLY)
    events = [event for _ in range(12) for event in engine.step()]
    metrics = events[-1].metrics
    assert metrics is not None
    assert (metrics.lost_members, metrics.exactness) == (("other",), "lossy")
