"""A policy that has nothing to draft for a while is left alone for as long as the same sequences run."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.engine import Engine
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import Draft, NoiseKey, Request, SamplingParams, Spent, Strategy, View

VOCAB = 16
LOGITS = RandomLogits(VOCAB, seed=3)


class Drowsy(Fixed):
    """Drafts each second time that it is asked; notes how long the text is whenever it is asked or told."""

    def __init__(self, rest: int) -> None:
        super().__init__(2)
        self._rest = rest
        self.asked: list[int] = []
        self.told: list[int] = []

    def plan(self, views: Sequence[View]) -> list[int]:
        self.asked.append(len(views[0].tokens))
        return super().plan(views) if len(self.asked) % 2 == 0 else [0] * len(views)

    def rest(self, views: Sequence[View]) -> int:
        return self._rest

    def learn(self, views: Sequence[View], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent) -> None:
        self.told.append(len(views[0].tokens))


def request(name: str, tokens: int = 40) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(id=name, prompt=(1, 2, 3), params=params, key=NoiseKey(0))


def wrong(policy: Fixed) -> Strategy:
    """Each draft is rejected, so each step commits one token."""
    drafter = toy_drafters.sometimes(toy_drafters.answer_by(LOGITS), VOCAB, (False,))
    return Strategy("wrong", drafter, SharedNoise(), policy)


def decode(policy: Fixed, steps: int) -> tuple[Engine, Strategy]:
    """So many steps of one request."""
    engine, strategy = Engine(ToyRunner(LOGITS, VOCAB), Steady()), wrong(policy)
    engine.add(request("a"), strategy)
    for _ in range(steps):
        engine.step()
    return engine, strategy


def test_a_resting_policy_is_neither_asked_nor_told() -> None:
    policy = Drowsy(rest=4)
    decode(policy, 13)
    assert policy.asked == [3, 8, 9, 14, 15], "asked, four steps left alone, asked and drafting, asked again"
    assert policy.told == [4, 9, 10, 15, 16]


def test_another_sequence_ends_the_rest_and_so_does_its_end() -> None:
    policy = Drowsy(rest=100)
    engine, strategy = decode(policy, 3)
    assert policy.asked == [3]
    engine.add(request("b", tokens=4), strategy)
    while len(policy.asked) < 2:
        engine.step()
    assert policy.asked == [3, 6], "asked as soon as another decodes beside it"
    while "b" in engine._sequences:
        engine.step()
    engine.step()
    assert len(policy.asked) > 2


def test_without_a_word_of_rest_a_policy_is_asked_in_each_step() -> None:
    policy = Drowsy(rest=0)
    decode(policy, 6)
    assert policy.asked == [3, 4, 5, 6, 7, 8]
    assert policy.told == [4, 5, 6, 7, 8, 9]
