"""Owners share the engine evenly, whatever they send: nobody's requests hold up another's."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from parlay.engine import Engine, Limits
from parlay.engine.shares import PREFILL_ROWS, ROWS
from parlay.router.policies import Plain
from parlay.sampling.rules import SharedNoise
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_SKIP, NoiseKey, Output, Request, SamplingParams, Segment, Skip, Strategy

VOCAB = 16
LOGITS = RandomLogits(VOCAB, seed=3)
PLAIN = Strategy("none", None, SharedNoise(), Plain())


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


def test_who_sends_much_slows_no_step_of_another() -> None:
    runner = Watched()
    engine = Engine(runner, Steady(), Limits(max_sequences=64))
    engine.add(request("modest", "modest", tokens=200), PLAIN)
    for number in range(60):
        engine.add(request(f"greedy{number}", "greedy", prompt=300, tokens=100), PLAIN)
    run(engine, 2)
    runner.rows.clear()
    told = run(engine, 100)
    assert told["m"] == 100
    assert max(runner.rows) <= 1 + ROWS + PREFILL_ROWS
    assert told["g"] > 300


def test_every_request_of_the_greedy_owner_gets_its_turns() -> None:
    engine = Engine(ToyRunner(LOGITS, VOCAB), Steady(), Limits(max_sequences=64))
    engine.add(request("modest", "modest", tokens=400), PLAIN)
    for number in range(50):
        engine.add(request(f"greedy{number}", "greedy", tokens=10), PLAIN)
    assert run(engine, 60)["g"] == 500


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
