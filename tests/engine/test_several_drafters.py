"""A policy that chooses among several drafters: who is asked, who sees what, and what becomes of one that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from parlay.engine import Engine
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import ToyRunner
from parlay.types import (
    NO_DRAFT,
    Budgets,
    Draft,
    Drafter,
    Event,
    Needs,
    NoiseKey,
    Observation,
    Request,
    SamplingParams,
    SequenceView,
    Spent,
    Strategy,
    trees,
)
from tests.engine.toy_engine import ANSWER, LOGITS, PLAIN, VOCAB, committed, engine

WRONG = toy_drafters.sometimes(ANSWER, VOCAB, (False,))
RIGHT = toy_drafters.oracle(ANSWER)
SILENT = toy_drafters.ToyDrafter(lambda view, budget: NO_DRAFT)


class InTurn(Fixed):
    """Asks one drafter after another until ``enough`` of them have proposed something; the last proposal counts."""

    def __init__(self, order: Sequence[int], watching: tuple[int, ...] = (), enough: int = 1) -> None:
        super().__init__(3)
        self._order, self._watching, self._enough = order, watching, enough
        self._asked = 0
        self._kept: list[Draft] = []
        self.offers: list[Draft | None] = []
        self.spent: list[Spent] = []

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        self._asked, self._kept = 0, []
        return self._next(views)

    def next_budgets(self, views: Sequence[SequenceView], drafts: Sequence[Draft | None]) -> Budgets:
        self.offers += drafts
        self._kept += [draft for draft in drafts if draft]
        return self._next(views)

    def _next(self, views: Sequence[SequenceView]) -> Budgets:
        watching = [self._watching] * len(views)
        if self._asked == len(self._order) or len(self._kept) >= self._enough:
            return Budgets([0] * len(views), watching=watching)
        self._asked += 1
        return Budgets([3] * len(views), 0, [self._order[self._asked - 1]] * len(views), watching)

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        self.spent.append(spent)


class First(InTurn):
    """Asks all, and keeps the first proposal instead of the last."""

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        return self._kept[:1] or list(drafts)


class Reader(toy_drafters.ToyDrafter):
    """Wants to see layers and choices, and notes what it is shown."""

    def __init__(self, needs: Needs) -> None:
        super().__init__(lambda view, budget: trees.chain([0], "reader"))
        self.needs = needs
        self.seen: list[Observation] = []

    def observe(self, observations: Sequence[Observation]) -> None:
        self.seen += observations


def decode(
    drafters: Sequence[Drafter], policy: InTurn, tokens: int = 24, clock: Callable[[], float] = time.perf_counter
) -> list[Event]:
    running = Engine(ToyRunner(LOGITS, VOCAB), Steady(), clock=clock)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    request = Request(id="a", prompt=(1, 2, 3), params=params, key=NoiseKey(0))
    running.add(request, Strategy("several", tuple(drafters), SharedNoise(), policy))
    events: list[Event] = []
    while not running.idle:
        events += running.step()
    return events


def plain_text(tokens: int = 24) -> list[int]:
    running = engine(ToyRunner(LOGITS, VOCAB))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    running.add(Request(id="a", prompt=(1, 2, 3), params=params, key=NoiseKey(0)), PLAIN)
    events: list[Event] = []
    while not running.idle:
        events += running.step()
    return committed(events)


def test_the_next_is_asked_where_one_has_nothing() -> None:
    events = decode([SILENT, RIGHT, WRONG], InTurn([0, 1, 2]))
    assert committed(events) == plain_text()
    assert len(events) == 6, "three right nodes and one more token in each step"


def test_an_earlier_proposal_of_the_step_may_be_kept() -> None:
    events = decode([WRONG, RIGHT], First([1, 0], enough=2))
    assert committed(events) == plain_text()
    assert len(events) == 6


def test_an_earlier_proposal_stays_where_the_next_has_nothing() -> None:
    events = decode([SILENT, RIGHT], First([1, 0], enough=2))
    assert committed(events) == plain_text()
    assert len(events) == 6


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_one_that_fails_is_dropped_and_the_others_go_on(where: str) -> None:
    policy = InTurn([0, 1], enough=2)
    events = decode([toy_drafters.Raising(WRONG, 1, where), RIGHT], policy)
    assert committed(events) == plain_text()
    assert len(events) == 6, "the other one drafts in every step"
    assert None in policy.offers, "the policy is told"
    metrics = events[-1].metrics
    assert metrics is not None
    assert metrics.drafter_faults == 1


def test_each_sees_what_it_asks_for_and_only_steps_that_it_watches() -> None:
    layers, choices = Reader(Needs(taps=(1,), outcomes=False)), Reader(Needs(top_k=2))
    decode([RIGHT, layers, choices], InTurn([0], watching=(2,)))
    assert [sorted(observation.taps) for observation in layers.seen] == [[1]], "the prompt's, when it is fed"
    assert len(choices.seen) == 6
    assert all(len(row) == 2 for observation in choices.seen for row in observation.top_k)
    assert not any(observation.taps for observation in choices.seen)


def test_seconds_are_charged_to_the_drafter_that_took_them() -> None:
    now = 0.0

    def taking(seconds: float, drafter: Drafter) -> Drafter:
        def guess(view: SequenceView, budget: int) -> Draft:
            nonlocal now
            now += seconds
            return drafter.propose([view], [budget])[0]

        return toy_drafters.ToyDrafter(guess)

    policy = InTurn([0, 1], enough=2)
    decode([taking(1, SILENT), taking(4, RIGHT), taking(9, WRONG)], policy, clock=lambda: now)
    assert {(spent.by_drafter, spent.draft_seconds) for spent in policy.spent} == {((1, 4, 0), 5)}
