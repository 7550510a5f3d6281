"""Drafting while the target verifies: in virtual time, and under random schedules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import pytest

from parlay.drafters.draft_models.beside import Chain, Written
from parlay.drafters.draft_models.parallel_draft import ParallelDraft
from parlay.drafters.options import ParallelDraftOptions
from parlay.engine import Engine, Limits
from parlay.router.policies import Fixed, adaptive
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance.stage import Steady
from parlay.testing.toy_drafters import ToyDrafter
from parlay.testing.toys import ToyRunner
from parlay.types import (
    Metrics,
    SequenceView,
    Strategy,
)
from tests.drafters.virtual_drafting import (
    ALWAYS,
    MOSTLY,
    NEVER,
    Time,
    TimedRunner,
    VirtualDrafting,
    options,
    plain,
    request,
    run,
    strategy,
    toy_resources,
)
from tests.engine.toy_engine import ANSWER, LOGITS, VOCAB, committed

# ------------------------------------------------------------------------------------------------------- virtual time


@pytest.mark.parametrize("token", [0.7, 1.0, 4.0])
@pytest.mark.parametrize(
    ("toy", "ahead"),
    [(ALWAYS, 0), *((toy, ahead) for toy in (ALWAYS, NEVER, MOSTLY) for ahead in (3, 8))],
    ids=["right-ratio", "right-3", "right-8", "wrong-3", "wrong-8", "mostly-3", "mostly-8"],
)
def test_a_step_takes_as_long_as_the_slower_of_drafting_and_verifying(
    toy: ToyDrafter, token: float, ahead: int
) -> None:
    """Within 2 percent, once the text has begun; where drafts are wrong, the next step waits for one token at most."""
    drafting = token * (ahead or max(2, int(FORWARD / token + 0.25)))
    expected = max(drafting, FORWARD)
    steps, text = timed(toy, token, options(ahead=ahead))
    assert text == plain([request(tokens=120)])["one"]
    assert len(steps) >= 4
    if toy is ALWAYS:
        assert steps == pytest.approx([expected] * len(steps), rel=0.02)
        assert len(text) / len(steps) > 2
    assert all(FORWARD * 0.98 <= step <= expected * 1.02 for step in steps)


FORWARD = 6.0


def timed(toy: ToyDrafter, token: float, how: ParallelDraftOptions) -> tuple[list[float], list[int]]:
    """Virtual seconds of the steps of a text, without those at its ends, in which less is drafted; and the text."""
    time = Time()
    drafter = ParallelDraft(toy_resources(), how, drafting=VirtualDrafting(toy, time, token))
    engine = Engine(TimedRunner(time, FORWARD), Steady(), clock=lambda: time.now)
    engine.add(request(tokens=120), strategy(drafter))
    ends, text = [0.0], []
    while not engine.idle:
        text += committed(engine.step())
        ends.append(time.now)
    return [after - before for before, after in pairwise(ends)][2:-2], text


def test_drafts_that_cost_little_are_written_first_where_they_are_often_wrong() -> None:
    """A forward without a draft would take longer; where drafting takes as long as a forward, it runs meanwhile."""
    often_wrong = toy_drafters.sometimes(ANSWER, VOCAB, [True, False, True, True, False])
    quick, pure = (timed(often_wrong, 0.3, options(ahead=ahead))[0] for ahead in (0, 20))
    assert sum(quick) < 0.75 * sum(pure)
    assert max(timed(often_wrong, 3.0, options())[0]) <= FORWARD * 1.02


def test_one_after_the_other_takes_the_sum() -> None:
    """What drafting during forwards saves, in the same virtual seconds."""
    took = {}
    for name in ("parallel", "serial"):
        time = Time()
        resource = VirtualDrafting(ALWAYS, time, 1.0)
        if name == "serial":
            resource.beside = lambda view: False  # type: ignore[method-assign]
        drafter = ParallelDraft(toy_resources(), options(ahead=6), drafting=resource)
        run(Engine(TimedRunner(time, 6.0), Steady()), [(request(tokens=300), strategy(drafter, 5))])
        took[name] = time.now
    assert took["serial"] / took["parallel"] == pytest.approx(11 / 6, rel=0.03)  # 5 tokens and a forward, or a forward


def test_amusd_drafts_until_the_forward_ends() -> None:
    time = Time()
    drafter = ParallelDraft(toy_resources(), options(form="amusd"), drafting=VirtualDrafting(ALWAYS, time, 1.0))
    engine, ends = Engine(TimedRunner(time, 6.5), Steady()), [0.0]
    engine.add(request(tokens=120), strategy(drafter, 30))
    while not engine.idle:
        engine.step()
        ends.append(time.now)
    steps = [after - before for before, after in pairwise(ends)][1:-2]
    assert steps == [7.0] * len(steps)  # the token that was being written is ended
    assert len(steps) <= 120 / 7


def test_texts_of_a_batch_are_drafted_for_together() -> None:
    """Each commits as many tokens as if it were alone, in steps that take no longer."""
    asked = [request(str(seed), seed) for seed in range(4)]
    time = Time()
    drafter = ParallelDraft(toy_resources(), options(ahead=6), drafting=VirtualDrafting(ALWAYS, time, 1.0))
    shared = strategy(drafter)
    texts = run(Engine(TimedRunner(time, 6.0), Steady()), [(one, shared) for one in asked])
    assert texts == plain(asked)
    assert time.now < 6.0 * (60 / 6 + 6)


# --------------------------------------------------------------------------------------------------- random schedules


class Unsteady(VirtualDrafting):
    """Delays of any length, chains that end anywhere, texts that can't be drafted for, and errors if ``fails``."""

    def __init__(self, toy: ToyDrafter, chance: random.Random, fails: float = 0.0) -> None:
        super().__init__(toy, Time(), 1.0)
        self._chance, self._fails = chance, fails

    def beside(self, view: SequenceView) -> bool:
        return view.request.key.seed % 5 != 3

    def write(self, views: Sequence[SequenceView], lengths: Sequence[int]) -> Written:
        return Written(self._some(super().write(views, lengths).chains), seconds=self._chance.random())

    def end(self, *, stop: bool) -> Written:
        written = super().end(stop=False)
        if self._chance.random() < self._fails:
            return Written(error=RuntimeError("the drafter stumbled"))
        return Written(self._some(written.chains), seconds=self._chance.random())

    def seconds(self) -> float:
        self._time.now += self._chance.random() * 9
        return self._time.now

    def _some(self, chains: dict[int, Chain]) -> dict[int, Chain]:
        kept = {name: chain for name, chain in chains.items() if self._chance.random() < 0.9}
        return {name: Chain(chain.tokens[: self._chance.randrange(9)]) for name, chain in kept.items()}


class Erratic(Fixed):
    """Other budgets in each step, 0 among them."""

    def __init__(self, chance: random.Random, budgets: Sequence[int] = (0, 1, 3, 7, 7)) -> None:
        super().__init__(0)
        self._chance, self._budgets = chance, budgets

    def plan(self, views: Sequence[SequenceView]) -> object:  # type: ignore[override]
        plan = super().plan(views)
        return plan._replace(nodes=[self._chance.choice(self._budgets) for _ in views])


@pytest.mark.parametrize("form", ["pearl", "amusd"])
@pytest.mark.parametrize("fails", [0.0, 0.05])
def test_texts_are_those_of_plain_decoding_whenever_drafts_come(form: str, fails: float) -> None:
    """Requests come and go, some are aborted while they are drafted for, some put back for want of memory."""
    for seed in range(6):
        chance = random.Random(seed)
        toy = toy_drafters.sometimes(ANSWER, VOCAB, [chance.random() < 0.8 for _ in range(17)])
        drafter = ParallelDraft(toy_resources(), options(form=form), drafting=Unsteady(toy, chance, fails))
        how = Strategy("parallel-draft", (drafter,), SharedNoise(), cast(Fixed, Erratic(chance)))
        asked = [request(str(number), seed * 8 + number, chance.randrange(5, 40)) for number in range(6)]
        engine = Engine(ToyRunner(LOGITS, VOCAB, capacity=150), Steady(), Limits(max_rows=40))
        texts: dict[str, list[int]] = {one.id: [] for one in asked}
        waiting = list(asked)
        while waiting or not engine.idle:
            if waiting and chance.random() < 0.4:
                engine.add(waiting.pop(), how)
            for event in engine.step():
                texts[event.request] += [each.token for each in event.committed]
            if chance.random() < 0.05:
                engine.abort(chance.choice(asked).id)
        for name, text in plain(asked).items():
            assert texts[name] == text[: len(texts[name])]
        assert not drafter._guesses
        assert not drafter.is_drafting


def test_it_goes_on_plainly_after_an_error_of_the_drafter() -> None:
    chance = random.Random(1)
    drafter = ParallelDraft(toy_resources(), options(), drafting=Unsteady(ALWAYS, chance, fails=1.0))
    engine = Engine(ToyRunner(LOGITS, VOCAB), Steady())
    engine.add(request(), strategy(drafter))
    text: list[int] = []
    metrics: Metrics | None = None
    while not engine.idle:
        for event in engine.step():
            text += [each.token for each in event.committed]
            metrics = event.metrics or metrics
    assert text == plain([request()])["one"]
    assert metrics is not None
    assert metrics.drafter_faults == 1


# --------------------------------------------------------------------------------------------------------------- price


class Noting(Steady):
    def __init__(self) -> None:
        self.rows: list[int] = []

    def forward(self, rows: int, context: int) -> float:
        return 4.0

    def record(self, rows: int, context: int, seconds: float) -> None:
        self.rows.append(rows)


def test_what_forwards_take_longer_is_charged_to_the_drafter() -> None:
    """A forward takes 6 seconds beside the drafter where it usually takes 4; no cost of rows is learned from that."""
    time, cost = Time(), Noting()
    drafter = ParallelDraft(toy_resources(), options(ahead=3), drafting=VirtualDrafting(NEVER, time, 1.0))
    engine = Engine(TimedRunner(time, 6.0), cost, clock=lambda: time.now)
    engine.add(request(tokens=11), strategy(drafter))
    metrics = [event.metrics for _ in range(11) for event in engine.step()][-1]
    assert metrics is not None
    assert metrics.verify_seconds == pytest.approx(4.0 * 10)
    assert metrics.draft_seconds >= 2.0 * 10
    assert cost.rows == []


def test_a_policy_that_stops_drafting_ends_it() -> None:
    """With an adaptive budget a drafter that is never right costs next to nothing in the end."""
    time = Time()
    drafter = ParallelDraft(toy_resources(), options(), drafting=VirtualDrafting(NEVER, time, 1.0))
    cost = Noting()
    how = Strategy("parallel-draft", (drafter,), SharedNoise(), adaptive(cost, 8))
    engine = Engine(TimedRunner(time, 4.0), cost, clock=lambda: time.now)
    texts = run(engine, [(request(tokens=300), how)])
    assert texts == plain([request(tokens=300)])
    assert time.now < 4.0 * 300 * 1.1
