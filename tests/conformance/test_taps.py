"""Hidden states that drafters read belong to the tokens that they are shown for, whatever happens to a sequence."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from parlay.engine import Engine, Limits
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance import native_stage, toy_stage
from parlay.testing.conformance.stage import Stage, StageRequest, StageSample, Steady, decode
from parlay.testing.conformance.strain import Pausing
from parlay.testing.conformance.universal import CAPACITY, agree, prompt
from parlay.testing.toy_head import StateOf, ToyHead, toy_state
from parlay.testing.toys import ToyRunner
from parlay.types import (
    NO_SKIP,
    Draft,
    Event,
    Output,
    Policy,
    SamplingParams,
    Segment,
    SequenceView,
    Skip,
    Spent,
    Strategy,
)

SAMPLED = SamplingParams(temperature=1.0, max_tokens=40)


@dataclass(frozen=True)
class Case:
    """A runner, and what the hidden states before two of its layers are."""

    stage: Stage
    state_of: StateOf
    layers: tuple[int, int]

    def head(self) -> ToyHead:
        """Two of three tokens that it drafts are right."""
        answer = toy_drafters.answer_by(self.stage.logits_of)
        inner = toy_drafters.sometimes(answer, self.stage.vocab_size, (True, True, False))
        return ToyHead(inner, self.state_of, self.layers)

    def ask(self, seed: int, length: int, **more: object) -> StageRequest:
        return replace(StageRequest(prompt(self.stage, seed, length), SAMPLED, seed), **more)

    def run(
        self, head: ToyHead, asks: Sequence[StageRequest], limits: Limits | None = None, **more: object
    ) -> list[StageSample]:
        """Decode; the texts are those of plain decoding, and all states that the head saw are right."""
        jobs = [(ask, drafting(head)) for ask in asks]
        agree(self.stage, jobs, limits, **more)  # type: ignore[arg-type]
        assert head.wrong == []


def drafting(head: ToyHead, policy: Policy | None = None) -> Strategy:
    return Strategy("head", (head,), SharedNoise(), policy or Fixed(4))


def states_of(stage: Stage) -> StateOf:
    """Those of a fresh forward over the whole text."""
    runner, names = stage.open_runner(CAPACITY), itertools.count()

    @cache
    def computed(text: tuple[int, ...]) -> dict[int, Tensor]:
        name = next(names)
        runner.open(name, text, salt=str(name))
        assert runner.reserve(name, len(text))
        out = runner.forward([Segment(name, text, logits_from=len(text))], (1, 3))
        runner.release(name)
        return {layer: states_NH[-1].clone() for layer, states_NH in out.taps.items()}

    return lambda layer, text: computed(tuple(text))[layer]


@cache
def case_of(name: str) -> Case:
    if name == "native":
        native = native_stage(torch.float32)
        return Case(native, states_of(native), (1, 3))
    recurrent = {"tree": "chain", "cut": 4} if name == "recurrent" else {}
    return Case(toy_stage(name, **recurrent), toy_state, (1, 4))  # type: ignore[arg-type]


@pytest.fixture(params=["toy", "recurrent", "native"])
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def test_a_head_is_shown_all_that_is_computed_and_asks_for_nothing(case: Case) -> None:
    """Alone from an empty cache; prompts in chunks, too."""
    for limits in (Limits(), Limits(max_rows=7, max_sequences=3)):
        head = case.head()
        case.run(head, [case.ask(seed, 20 + seed) for seed in range(3)], limits)
        assert head.shown > 150
        assert head.asked == 0
        assert head.lacking == 3, "in the step that computes the prompt's states none are there yet"


def test_after_a_prefix_hit_the_head_catches_up(case: Case) -> None:
    """What the cache held was computed for others: it is asked for, once, and charged to the request."""
    head, runner = case.head(), case.stage.open_runner(CAPACITY)
    ask = case.ask(3, 37)
    (first,) = decode(runner, [(ask, drafting(head))])
    (second,) = decode(runner, [(replace(ask, sample_index=1), drafting(head))])
    assert second.metrics.cached_tokens >= 32
    assert second.tokens == case.stage.expected(replace(ask, sample_index=1)).output
    assert head.wrong == []
    assert head.asked == second.metrics.cached_tokens
    assert first.metrics.layer_rows == 0
    assert second.metrics.layer_rows >= second.metrics.cached_tokens
    assert second.metrics.draft_seconds + second.metrics.prefill_seconds >= second.metrics.layer_seconds > 0
    assert head.lacking == 1, "the first request's first step"
    assert second.metrics.draft_steps >= second.metrics.steps - 1, "the last step may have no room for a draft"


def test_four_samples_of_a_prompt_read_what_their_leader_computed(case: Case) -> None:
    head = case.head()
    case.run(head, [case.ask(8, 30, sample_index=index, group="g") for index in range(4)])
    if case.stage.name == "recurrent":  # a fork can go back to a snapshot only, so it computes the last tokens itself
        assert (head.asked, head.lacking) == (3 * 28, 4)
    else:
        assert (head.asked, head.lacking) == (3 * 29, 1)


def test_a_preempted_sequence_goes_on_with_what_its_head_holds(case: Case) -> None:
    head = case.head()
    asks = [case.ask(19 + index, 20 + 9 * index) for index in range(6)]
    case.run(head, asks, Limits(max_rows=48), capacity=208)
    assert head.shown > sum(len(ask.prompt) + 40 for ask in asks) - 6, "none was preempted, so none was shown again"


def test_a_head_whose_request_was_aborted_starts_afresh(case: Case) -> None:
    head, runner = case.head(), case.stage.open_runner(CAPACITY)
    engine = Engine(runner, Steady())
    ask = case.ask(5, 25)
    engine.add(ask.request("gone"), drafting(head))
    for _ in range(5):
        engine.step()
    assert engine.abort("gone") is not None
    engine.add(ask.request("again"), drafting(head))
    assert tokens_of(engine) == case.stage.expected(ask).output
    assert head.wrong == []
    assert head.asked >= 16
    assert head.lacking <= 2


def test_a_head_that_pauses_catches_up_when_it_may_draft_again(case: Case) -> None:
    head, ask = case.head(), case.ask(5, 25)
    strategy = drafting(head, Pausing(4, range(4, 12)))
    (sample,) = decode(case.stage.open_runner(CAPACITY), [(ask, strategy)])
    assert sample.tokens == case.stage.expected(ask).output
    assert (head.wrong, head.lacking) == ([], 1)
    fed_again = case.stage.name == "recurrent"  # the pause began with tokens that were accepted in part
    assert head.asked == 8 - fed_again, "one token in each step of the pause"


def tokens_of(engine: Engine) -> list[int]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
        engine.runner.check()
    return [one.token for event in events for one in event.committed]


class Watched(ToyRunner):
    """Remembers how many rows each forward tapped."""

    def __init__(self, stage: Stage, capacity: int = CAPACITY) -> None:
        super().__init__(stage.logits_of, stage.vocab_size, capacity=capacity)
        self.tapped: list[int] = []

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.tapped.append(sum(segment.rows for segment in segments) if taps else 0)
        return super().forward(segments, taps, skip)


def test_steps_that_decode_plainly_are_not_tapped() -> None:
    case = case_of("toy")
    runner, ask = Watched(case.stage), case.ask(5, 25)
    decode(runner, [(ask, drafting(case.head(), Fixed(0)))])
    assert runner.tapped == [25] + [0] * 39, "the prompt alone"
    decode(runner, [(replace(ask, sample_index=1), Strategy("none", (), SharedNoise(), Fixed(0)))])
    assert not any(runner.tapped[1:])


class Slow(Watched):
    """Says that taps took `SECONDS` of each forward that has some."""

    SECONDS = 0.001

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        time.sleep(self.SECONDS)
        out = super().forward(segments, taps, skip)
        return replace(out, tap_seconds=self.SECONDS if taps else 0.0)


class Bill(Fixed):
    """Remembers what each step's drafts are said to have cost."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.drafting: list[float] = []

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        self.drafting.append(spent.draft_seconds)


def test_taps_are_charged_to_the_drafter_that_reads_them() -> None:
    """To its policy, and as draft seconds to its request; a request beside it that decodes plainly pays nothing."""
    case, policy = case_of("toy"), Bill(4)
    ask = case.ask(5, 25)
    (drafted,) = decode(Slow(case.stage), [(ask, drafting(case.head(), policy))])
    assert min(policy.drafting) >= Slow.SECONDS
    assert drafted.metrics.draft_seconds >= Slow.SECONDS * drafted.metrics.draft_steps
    plain, resting = drafting(case.head(), Fixed(0)), Bill(0)
    decode(Slow(case.stage), [(ask, plain), (case.ask(6, 25), drafting(case.head(), resting))])
    assert max(resting.drafting) == 0.0


def test_a_head_reads_long_texts_in_pieces() -> None:
    """No call runs more rows than a step; until all is there nothing is drafted."""
    case = case_of("toy")
    head, runner, ask = case.head(), Watched(case.stage), case.ask(5, 100)
    decode(runner, [(ask, Strategy("none", (), SharedNoise(), Fixed(0)))])
    runner.tapped.clear()
    (sample,) = decode(runner, [(replace(ask, sample_index=1), drafting(head))], Limits(max_rows=32))
    assert sample.tokens == case.stage.expected(replace(ask, sample_index=1)).output
    assert max(runner.tapped) == 32
    assert head.lacking == 3, "three pieces were not enough"
    assert head.wrong == []


def test_where_the_cache_has_no_room_a_head_does_without() -> None:
    case = case_of("toy")
    head, ask = case.head(), case.ask(5, 40)
    runner = Watched(case.stage, capacity=len(ask.prompt) + 40)
    policy = Pausing(4, range(2, 30))
    (sample,) = decode(runner, [(ask, drafting(head, policy))])
    assert sample.tokens == case.stage.expected(ask).output
    assert sample.metrics.drafter_faults == 0
    assert head.wrong == []
    assert head.lacking > 5


def test_layers_that_the_target_lacks_are_refused() -> None:
    case = case_of("toy")
    engine = Engine(case.stage.open_runner(CAPACITY), Steady())
    head = ToyHead(case.head(), toy_state, (1, 5))
    with pytest.raises(ValueError, match=r"head reads the hidden states of layers 1, 5, but those of toy are 0 to 4"):
        engine.add(case.ask(5, 10).request("r"), drafting(head))


def test_what_a_head_may_not_read_is_said() -> None:
    case = case_of("toy")
    engine = Engine(case.stage.open_runner(CAPACITY), Steady())
    head, ask = case.head(), case.ask(5, 10)
    engine.add(ask.request("r"), drafting(head))
    engine.step()
    (view,) = engine.scheduler.running
    assert view.layers is not None
    with pytest.raises(ValueError, match="not lent"):
        view.layers.states([view], [(0, 1)], (1,))
