"""Several groups of sequences in flight: every text is the one it would be alone, and no stage of a model is idle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parlay.engine import Engine, Limits
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance import catalogue_specs, check_runner, check_strategy, toy_stage
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import ToyRunner
from parlay.types import (
    NO_SKIP,
    Draft,
    Finish,
    NoiseKey,
    Output,
    Request,
    RunnerLost,
    SamplingParams,
    Segment,
    SequenceView,
    Skip,
    Strategy,
)
from tests.engine.toy_engine import ANSWER, LOGITS, PLAIN, VOCAB, committed

STAGES = [toy_stage("two in flight", in_flight=2), toy_stage("three, with snapshots", in_flight=3, cut=4)]


CHECKS = ["mixed", "endings", "forks", "chunks", "preemption", "failures", "interruptions"]


@pytest.mark.parametrize("strategy", ["token-recycling:k=6", "draft-model:k=3", "denoise"])
def test_strategies_write_the_text_of_plain_decoding(strategy: str) -> None:
    """Several texts together, under stops, aborts, preemption, forks, and failing drafters."""
    report = check_strategy(strategy, stages=STAGES, checks=CHECKS)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", catalogue_specs())
def test_all_strategies_write_the_text_of_plain_decoding(strategy: str) -> None:
    report = check_strategy(strategy, stages=STAGES[:1], checks=["sampled", *CHECKS])
    assert report.passed, str(report)


def test_the_toy_keeps_the_protocol() -> None:
    report = check_runner(STAGES[0].open_runner, STAGES[0].logits_of)
    assert report.passed, str(report)


class Staged(ToyRunner):
    """Runs in stages, the first of them in the engine's own time: ``now`` goes on only where the engine waits.

    A stage takes one second, and ``row`` for each row.
    """

    def __init__(self, stages: int, in_flight: int, row: float = 0.0) -> None:
        super().__init__(LOGITS, VOCAB, in_flight=in_flight)
        self.now, self.most, self._under_way = 0.0, 0, 0
        self.busy, self._free, self._row = [0.0] * stages, [0.0] * stages, row

    def cost(self, rows: int, context: int) -> float:
        return len(self.busy) * (1 + self._row * rows)

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        return self.begin(segments, taps, skip)()

    def begin(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Finish:
        done, out, here = self.now, super().forward(segments, taps, skip), 0.0
        seconds = 1 + self._row * sum(segment.rows for segment in segments)
        for stage in range(len(self.busy)):
            done = max(done, self._free[stage]) + seconds
            self._free[stage] = done
            self.busy[stage] += seconds
            here = done if stage == 0 else here
        self.now, self._under_way = here, self._under_way + 1
        self.most = max(self.most, self._under_way)

        def wait() -> Output:
            self.now, self._under_way = max(self.now, done), self._under_way - 1
            return out

        return wait


class Slow:
    """Drafts what the target will say, and takes a while."""

    def __init__(self, runner: Staged, seconds: float) -> None:
        self._drafter, self._runner, self._seconds = toy_drafters.oracle(ANSWER), runner, seconds
        self.needs, self.observe, self.release = self._drafter.needs, self._drafter.observe, self._drafter.release

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._runner.now += self._seconds
        return list(self._drafter.propose(views, budgets))


def run(runner: ToyRunner, strategy: Strategy = PLAIN, requests: int = 8, **limits: int) -> dict[str, list[int]]:
    clock, cost = (lambda: 0.0), Steady()
    if isinstance(runner, Staged):
        clock = lambda: runner.now  # noqa: E731
        cost.forward = runner.cost  # type: ignore[method-assign]
    engine = Engine(runner, cost, Limits(**limits), clock=clock)
    for number in range(requests):
        engine.add(request(number), strategy)
    texts: dict[str, list[int]] = {str(number): [] for number in range(requests)}
    while not engine.idle:
        for event in engine.step():
            texts[event.request] += committed([event])
    return texts


def request(number: int, tokens: int = 40) -> Request:
    params = SamplingParams(temperature=1.0, max_tokens=tokens)
    return Request(id=str(number), prompt=(1, 2, 3 + number), params=params, key=NoiseKey(number))


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_are_busy_nine_tenths_of_the_time(stages: int) -> None:
    """With one forward in flight each is busy its share of the time, and the texts are the same."""
    runner, alone = Staged(stages, stages), Staged(stages, 1)
    assert run(runner) == run(alone)
    assert min(runner.busy) / runner.now > 0.9
    assert max(alone.busy) / alone.now == pytest.approx(1 / stages)
    assert runner.most == stages


def drafted(in_flight: int, row: float) -> Staged:
    """Decode with drafts that take half a second each time."""
    runner = Staged(2, in_flight, row)
    run(runner, Strategy("slow", (Slow(runner, 0.5),), SharedNoise(), Fixed(3)))
    return runner


def test_one_group_drafts_while_another_is_verified() -> None:
    """Two groups of half the rows each take less time than one, though drafts are made twice as often."""
    alone, groups = drafted(1, row=0.2), drafted(2, row=0.2)
    assert groups.most == 2
    assert groups.now < 0.75 * alone.now


def test_groups_that_would_lose_are_one() -> None:
    """Where rows cost next to nothing, two groups only double what is spent on drafts."""
    alone, groups = drafted(1, row=0.0), drafted(2, row=0.0)
    assert groups.now < 1.2 * alone.now  # two groups at first, until it is known


def test_groups_are_even_and_share_a_prompt() -> None:
    """Also where requests come and go, and forks wait for the sample whose cache they share."""
    sizes: list[int] = []

    class Watched(ToyRunner):
        def begin(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Finish:
            sizes.append(len(segments))
            return super().begin(segments, taps, skip)

    run(Watched(LOGITS, VOCAB, in_flight=2), requests=7)
    assert max(sizes) == 4
    assert sizes[:4] == [4, 3, 4, 3]


def test_requests_that_end_in_flight_leave_nothing_behind() -> None:
    """Their forward is waited for, nothing is committed of it, and the engine goes on."""
    runner = Staged(2, 2)
    engine = Engine(runner, Steady())
    for number in range(4):
        engine.add(request(number), PLAIN)
    for _ in range(5):
        engine.step()
    done = [engine.abort(str(number)) for number in range(4)]
    assert all(event is not None and event.finish_reason == "abort" for event in done)
    assert engine.idle
    assert runner._under_way == 0
    runner.check()
    assert runner.free_tokens() == runner.capacity()
    engine.add(request(9), PLAIN)
    text = []
    while not engine.idle:
        text += committed(engine.step())
    assert text == run(ToyRunner(LOGITS, VOCAB), requests=10)["9"]


class Failing(ToyRunner):
    """Some outputs can't be had: the first forward ``at`` which it happens is counted from 0."""

    def __init__(self, at: int, error: type[Exception]) -> None:
        super().__init__(LOGITS, VOCAB, in_flight=2)
        self._left, self._error = at, error

    def begin(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Finish:
        finish = super().begin(segments, taps, skip)
        self._left -= 1
        if self._left != -1:
            return finish

        def fail() -> Output:
            finish()
            raise self._error("no output")

        return fail


def test_a_forward_that_fails_at_its_end_is_run_again() -> None:
    assert run(Failing(3, RuntimeError), requests=4) == run(ToyRunner(LOGITS, VOCAB), requests=4)


def test_a_runner_that_is_lost_in_flight_ends_the_step() -> None:
    with pytest.raises(RunnerLost, match="no output"):
        run(Failing(3, RunnerLost), requests=4)


def test_costs_are_learned_from_forwards_that_were_alone() -> None:
    """Seconds that other groups had their part in say nothing of a forward's own."""

    class Recorded(Steady):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def record(self, rows: int, context: int, seconds: float) -> None:
            self.seconds.append(seconds)

    runner, cost = Staged(2, 2), Recorded()
    engine = Engine(runner, cost, clock=lambda: runner.now)
    engine.add(request(0, tokens=5), PLAIN)
    engine.add(request(1, tokens=9), PLAIN)
    while not engine.idle:
        engine.step()
    assert cost.seconds == [2.0] * 4
