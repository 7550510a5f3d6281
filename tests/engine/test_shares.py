"""Owners share the engine evenly, whatever they send: nobody's requests hold up another's."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from parlay.engine import Engine, Limits
from parlay.engine.fair_share import divided
from parlay.engine.owner_latency import Paces
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import ToyRunner
from parlay.types import NO_SKIP, NoiseKey, Output, Request, SamplingParams, Segment, Skip
from tests.engine.toy_engine import LOGITS, PLAIN, VOCAB


class Steep(Steady):
    """Each row costs a quarter of a forward."""

    def forward(self, rows: int, context: int) -> float:
        return 1 + 0.25 * rows


class Watched(ToyRunner):
    """Remembers the rows of each step."""

    def __init__(self) -> None:
        super().__init__(LOGITS, VOCAB)
        self.rows: list[int] = []

    def forward(self, segments: list[Segment], taps: tuple[int, ...] = (), skip: Skip = NO_SKIP) -> Output:  # type: ignore[override]
        self.rows.append(sum(len(segment.pending) for segment in segments))
        return super().forward(segments, taps, skip)


def request(name: str, owner: str, *, prompt: int = 3, tokens: int = 20, priority: int = 0) -> Request:
    ids = tuple(random.Random(name).choices(range(VOCAB), k=prompt))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return Request(id=name, prompt=ids, params=params, key=NoiseKey(0), owner=owner, priority=priority)


def run(engine: Engine, steps: int) -> Counter[str]:
    """Tokens committed by the owner's initial."""
    told: Counter[str] = Counter()
    for _ in range(steps):
        for event in engine.step():
            told[event.request[0]] += len(event.committed.tokens)
    return told


@pytest.mark.parametrize("priority", [0, -16])
def test_a_newcomer_starts_at_once_although_another_has_every_place(priority: int) -> None:
    engine = Engine(ToyRunner(LOGITS, VOCAB), Steady(), Limits(max_sequences=4))
    for number in range(40):
        engine.add(request(f"greedy{number}", "greedy", tokens=500, priority=priority), PLAIN)
    run(engine, 3)
    engine.add(request("modest", "modest", tokens=20), PLAIN)
    assert run(engine, 21)["m"] == 20


def test_who_sends_much_slows_no_step_of_another_to_more_than_twice_its_seconds() -> None:
    runner = Watched()
    engine = Engine(runner, Steep(), Limits(max_sequences=64))
    engine.add(request("modest", "modest", tokens=200), PLAIN)
    for number in range(60):
        engine.add(request(f"greedy{number}", "greedy", prompt=300, tokens=100), PLAIN)
    run(engine, 2)
    runner.rows.clear()
    told = run(engine, 100)
    assert told["m"] == 100
    assert max(runner.rows) <= 6  # 1 + 6 / 4 is twice 1 + 1 / 4
    assert sum(runner.rows) > 150


def test_a_newcomer_does_not_wait_for_the_prompts_of_another() -> None:
    runner = Watched()
    engine = Engine(runner, Steep(), Limits(max_sequences=8))
    for number in range(20):
        engine.add(request(f"greedy{number}", "greedy", prompt=2000, tokens=100), PLAIN)
    run(engine, 1)
    engine.add(request("modest", "modest", prompt=100), PLAIN)
    assert run(engine, 2)["m"] > 0


def test_every_request_of_the_greedy_owner_gets_its_turns() -> None:
    engine = Engine(ToyRunner(LOGITS, VOCAB), Steady(), Limits(max_sequences=64))
    engine.add(request("modest", "modest", tokens=1000), PLAIN)
    for number in range(50):
        engine.add(request(f"greedy{number}", "greedy", tokens=10), PLAIN)
    assert run(engine, 900)["g"] == 500


@pytest.mark.parametrize("beside", [1.2, 2.0, 5.0])
@pytest.mark.parametrize("drafted", [1.0, 4.0])
def test_tokens_take_at_most_twice_as_long_as_alone(beside: float, drafted: float) -> None:
    """Alone a step takes a second and brings as many tokens as drafts do; shared steps take longer and bring one."""
    paces = Paces()
    paces.know("modest", 1.0)
    for _ in range(100):
        paces.learn("modest", 1.0, drafted, owners=1, alone=True)
    seconds = tokens = 0.0
    shared = 0
    for _ in range(1000):
        alone = paces.first(["modest"]) is not None
        step, brought = (1.0, drafted) if alone else (beside, 1.0)
        paces.learn("modest", step, brought, owners=2, alone=alone)
        seconds, tokens, shared = seconds + step, tokens + brought, shared + (not alone)
    assert seconds / tokens <= 2 / drafted
    assert shared > 100


def test_an_owner_whose_machine_has_become_slower_does_not_starve_the_others() -> None:
    paces = Paces()
    paces.know("modest", 0.001)
    turns = []
    for _ in range(1000):
        turns.append(paces.first(["modest"]))
        paces.learn("modest", 1.0, 1.0, owners=2, alone=turns[-1] is not None)
    assert turns.count(None) > 100


def test_who_wants_little_leaves_the_others_the_rest() -> None:
    assert divided(16, {"a": 1, "b": 100}) == {"a": 1, "b": 15}
    assert divided(16, {"a": 40, "b": 100}) == {"a": 8, "b": 8}
    assert divided(3, {"a": 9, "b": 9, "c": 9}) == {"a": 1, "b": 1, "c": 1}


def test_sharing_changes_no_text() -> None:
    def texts(owners: int) -> dict[str, list[int]]:
        engine = Engine(ToyRunner(LOGITS, VOCAB), Steady(), Limits(max_sequences=6))
        for number in range(20):
            engine.add(request(f"{number}", str(number % owners), prompt=3 + 7 * number), PLAIN)
        written: dict[str, list[int]] = {}
        while not engine.idle:
            for event in engine.step():
                written.setdefault(event.request, []).extend(event.committed.tokens)
        return written

    assert texts(1) == texts(3)
