"""A policy that is inactive for some steps is not called in them, for as long as the same sequences run."""

from __future__ import annotations

from collections.abc import Sequence

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
    Needs,
    NoiseKey,
    Observation,
    Request,
    SamplingParams,
    SequenceView,
    Spent,
    Strategy,
)
from tests.engine.toy_engine import LOGITS, VOCAB


class Drowsy(Fixed):
    """Drafts each second time that it is asked; notes how long the text is whenever it is asked or told."""

    def __init__(self, inactive: int) -> None:
        super().__init__(2)
        self._inactive = inactive
        self.asked: list[int] = []
        self.told: list[int] = []

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        self.asked.append(len(views[0].tokens))
        return super().plan(views) if len(self.asked) % 2 == 0 else Budgets([0] * len(views), self._inactive)

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        self.told.append(len(views[0].tokens))


def request(name: str, tokens: int = 40) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(id=name, prompt=(1, 2, 3), params=params, key=NoiseKey(0))


def wrong(policy: Fixed) -> Strategy:
    """Each draft is rejected, so each step commits one token."""
    drafter = toy_drafters.sometimes(toy_drafters.answer_by(LOGITS), VOCAB, (False,))
    return Strategy("wrong", (drafter,), SharedNoise(), policy)


def decode(policy: Fixed, steps: int) -> tuple[Engine, Strategy]:
    """So many steps of one request."""
    engine, strategy = Engine(ToyRunner(LOGITS, VOCAB), Steady()), wrong(policy)
    engine.add(request("a"), strategy)
    for _ in range(steps):
        engine.step()
    return engine, strategy


def test_an_inactive_policy_is_neither_asked_nor_told() -> None:
    policy = Drowsy(inactive=4)
    decode(policy, 13)
    assert policy.asked == [3, 8, 9, 14, 15], "asked, four steps left alone, asked and drafting, asked again"
    assert policy.told == [4, 9, 10, 15, 16]


def test_another_sequence_ends_it_and_so_does_its_end() -> None:
    policy = Drowsy(inactive=100)
    engine, strategy = decode(policy, 3)
    assert policy.asked == [3]
    engine.add(request("b", tokens=4), strategy)
    while len(policy.asked) < 2:
        engine.step()
    assert policy.asked == [3, 6], "asked as soon as another decodes beside it"
    while "b" in engine.requests:
        engine.step()
    engine.step()
    assert len(policy.asked) > 2


def test_a_policy_that_is_not_inactive_is_asked_in_each_step() -> None:
    policy = Drowsy(inactive=0)
    decode(policy, 6)
    assert policy.asked == [3, 4, 5, 6, 7, 8]
    assert policy.told == [4, 5, 6, 7, 8, 9]


class Watching(toy_drafters.ToyDrafter):
    """Notes the lengths of the texts that it sees, and those where it sees what the sampler prefers."""

    needs = Needs(top_k=1)

    def __init__(self) -> None:
        super().__init__(lambda view, budget: NO_DRAFT)
        self.seen: list[int] = []
        self.chosen: list[int] = []

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self.seen.append(len(observation.view.tokens))
            self.chosen += [len(observation.view.tokens)] * len(observation.top_k)


def test_a_drafter_that_is_not_asked_costs_nothing_but_its_first_look_at_a_text() -> None:
    """It is asked in the steps after 8 and 14 tokens, and sees what happened there, and in the first step."""
    drafter = Watching()
    engine = Engine(ToyRunner(LOGITS, VOCAB), Steady())
    engine.add(request("a"), Strategy("watching", (drafter,), SharedNoise(), Drowsy(inactive=4)))
    for _ in range(13):
        engine.step()
    assert drafter.seen == [4, 9, 15]
    assert drafter.chosen == [9, 15]
