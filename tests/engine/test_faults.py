"""A fault stays with the request that has it: the others go on with the very text they would have had."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from parlay.engine import Engine
from parlay.router.policies import Fixed, Plain
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import ToyRunner
from parlay.types import (
    NO_DRAFT,
    NO_SKIP,
    Budgets,
    Draft,
    Event,
    Fault,
    NoiseKey,
    Output,
    Request,
    SamplingParams,
    Segment,
    SequenceView,
    Skip,
    Spent,
    Strategy,
    Verdict,
)
from tests.engine.toy_engine import LOGITS, VOCAB, committed

POISON = 13


class Choosy(ToyRunner):
    """Raises for a batch in which some segment is refused."""

    def __init__(self, refused: Callable[[Segment], bool]) -> None:
        super().__init__(LOGITS, VOCAB)
        self._refused = refused

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        out = super().forward(segments, taps, skip)  # rows are staged, whatever comes of them
        if any(self._refused(segment) for segment in segments):
            raise RuntimeError("bad row")
        return out


class Sick(SharedNoise):
    """A rule that raises on whatever holds the poison."""

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        if any(POISON in view.tokens[: view.prompt_length] for view in views):
            raise RuntimeError("bad rule")
        return super().accept(views, drafts, logits_RV, roots)


class Stumbling:
    """A stop checker that can't read its third token."""

    def __init__(self) -> None:
        self._left = 2

    def push(self, token: int) -> bool:
        self._left -= 1
        if self._left < 0:
            raise UnicodeError("bad token")
        return False


def _oracle() -> toy_drafters.ToyDrafter:
    return toy_drafters.oracle(toy_drafters.answer_by(LOGITS))


def strategy(rule: SharedNoise | None = None, *, drafts: bool = True) -> Strategy:
    return Strategy("s", (_oracle(),) if drafts else (), rule or SharedNoise(), Fixed(3) if drafts else Plain())


def request(name: str, *prompt: int, **fields: Stumbling) -> Request:
    params = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1)
    return Request(id=name, prompt=prompt, params=params, key=NoiseKey(0), **fields)


def run(runner: ToyRunner, asks: list[tuple[Request, Strategy]]) -> dict[str, list[Event]]:
    target = Engine(runner, Steady())
    events: dict[str, list[Event]] = {}
    for one, how in asks:
        target.add(one, how)
    while not target.idle:
        for event in target.step():
            events.setdefault(event.request, []).append(event)
        runner.check()
    assert runner.free_tokens() == runner.capacity()
    assert sum(target.stats().finished.values()) == len(asks)
    return events


def outcome(events: list[Event]) -> tuple[object, ...]:
    return committed(events), events[-1].finish_reason, events[-1].prompt_logprobs


WELL = [request("a", 1, 2, 3), request("c", 4, 5), request("d", 6, 7, 8, 9)]


def expected() -> dict[str, tuple[object, ...]]:
    asks = [(one, strategy()) for one in WELL]
    return {name: outcome(events) for name, events in run(ToyRunner(LOGITS, VOCAB), asks).items()}


@pytest.mark.parametrize("drafts", [True, False])
def test_a_forward_that_fails_on_one_request_costs_no_other_anything(drafts: bool) -> None:
    runner = Choosy(lambda segment: segment.pending == (1, POISON))
    asks = [(one, strategy(drafts=drafts)) for one in [WELL[0], request("b", 1, POISON), *WELL[1:]]]
    finished = run(runner, asks)
    sick = finished.pop("b")
    assert sick[-1].finish_reason == "error"
    assert sick[-1].error == "the model failed on this request: RuntimeError: bad row"
    assert {name: outcome(events) for name, events in finished.items()} == expected()


def test_a_draft_on_which_the_forward_fails_is_left_out() -> None:
    finished = run(Choosy(lambda segment: len(segment.tree) > 2), [(one, strategy()) for one in WELL])
    assert {name: outcome(events) for name, events in finished.items()} == expected()


def test_a_model_that_fails_on_everything_ends_each_request_with_the_reason() -> None:
    finished = run(Choosy(lambda segment: True), [(one, strategy()) for one in WELL])
    assert [events[-1].error for events in finished.values()] == [
        "the model failed on this request: RuntimeError: bad row"
    ] * 3


def test_a_rule_that_raises_ends_the_guilty_request_alone() -> None:
    sick = strategy(Sick())
    finished = run(ToyRunner(LOGITS, VOCAB), [(one, sick) for one in [request("b", 1, POISON), *WELL]])
    told = r"accept rule Sick failed at line \d+ of test_faults.py \(RuntimeError: bad rule\)"
    assert re.fullmatch(told, finished.pop("b")[-1].error or "")
    assert {name: outcome(events) for name, events in finished.items()} == expected()


class Curt(SharedNoise):
    """A rule that has no verdict for the last of several sequences."""

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        return super().accept(views, drafts, logits_RV, roots)[: max(1, len(views) - 1)]


def test_a_rule_that_gives_too_few_verdicts_is_asked_for_each_sequence_alone() -> None:
    finished = run(ToyRunner(LOGITS, VOCAB), [(one, strategy(Curt())) for one in WELL])
    assert {name: outcome(events) for name, events in finished.items()} == expected()


def test_choices_that_can_not_be_told_cost_the_drafts_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[tuple[int, ...]]:
        raise RuntimeError("bad sampler")

    monkeypatch.setattr("parlay.engine.verify.ranked", refuse)
    wants_top_k = replace(strategy(), drafters=(toy_drafters.RejectedReader(_oracle(), LOGITS),))
    finished = run(ToyRunner(LOGITS, VOCAB), [(one, wants_top_k) for one in WELL])
    assert {name: outcome(events) for name, events in finished.items()} == expected()
    assert [events[-1].metrics.drafter_faults for events in finished.values() if events[-1].metrics] == [1, 1, 1]


class Billed(Steady):
    """Notes the rows of each step that it was told of."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def record(self, rows: int, context: int, seconds: float) -> None:
        self.rows.append(rows)


@pytest.mark.parametrize("fails", [True, False])
def test_seconds_of_forwards_that_ran_again_are_no_price(fails: bool) -> None:
    cost = Billed()
    target = Engine(Choosy(lambda segment: fails and len(segment.tree) > 2), cost)
    for one in WELL:
        target.add(one, strategy())
    target.step()
    assert cost.rows == ([] if fails else [sum(len(one.prompt) + 3 for one in WELL)])


def test_a_stop_checker_that_raises_ends_its_own_request() -> None:
    asks = [(one, strategy()) for one in [request("b", 1, 2, stop_checker=Stumbling()), *WELL]]
    finished = run(ToyRunner(LOGITS, VOCAB), asks)
    assert finished.pop("b")[-1].error == "UnicodeError: bad token"
    assert {name: outcome(events) for name, events in finished.items()} == expected()


class Unruly(Fixed):
    """A policy that raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__(3)
        self._method = method

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        self._raise("plan")
        return super().plan(views)

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        self._raise("trim")
        return super().trim(views, drafts)

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        self._raise("learn")

    def release(self, sequence: int) -> None:
        self._raise("release")

    def _raise(self, method: str) -> None:
        if method == self._method:
            raise RuntimeError("bad policy")


@pytest.mark.parametrize("method", ["plan", "trim", "learn", "release"])
def test_a_policy_that_raises_costs_its_requests_their_drafts_and_nothing_else(method: str) -> None:
    unruly = replace(strategy(), policy=Unruly(method))
    finished = run(ToyRunner(LOGITS, VOCAB), [(one, unruly if one is WELL[0] else strategy()) for one in WELL])
    assert {name: outcome(events) for name, events in finished.items()} == expected()
    faults = {name: events[-1].metrics.drafter_faults for name, events in finished.items() if events[-1].metrics}
    assert faults == {"a": int(method != "release"), "c": 0, "d": 0}


class Clinging(toy_drafters.ToyDrafter):
    """A drafter that lets no sequence go."""

    def release(self, sequence: int) -> None:
        raise RuntimeError("bad drafter")


def test_a_drafter_that_raises_at_the_end_keeps_no_request_from_ending() -> None:
    clinging = replace(strategy(), drafters=(Clinging(lambda view, budget: NO_DRAFT),))
    finished = run(ToyRunner(LOGITS, VOCAB), [(one, clinging) for one in WELL])
    assert {name: outcome(events) for name, events in finished.items()} == expected()
