"""Who runs when: no request starves, long prompts delay nobody, and memory that runs out loses nothing."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Sequence

import pytest

from parlay.engine import Engine
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.toys import ToyRunner
from parlay.types import NO_SKIP, Event, NoiseKey, Output, Request, SamplingParams, Segment, Skip, Strategy
from tests.engine.toy_engine import LOGITS, PLAIN, VOCAB, committed, engine

ORACLE = Strategy("oracle", (toy_drafters.oracle(toy_drafters.answer_by(LOGITS)),), SharedNoise(), Fixed(4))


class Watched(ToyRunner):
    """Remembers the largest step, and how often a sequence was opened."""

    rows = opened = 0

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.rows = max(self.rows, sum(len(segment.pending) for segment in segments))
        return super().forward(segments, taps, skip)

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        self.opened += 1
        return super().open(sequence, tokens, salt)


def request(name: str, prompt: int = 3, tokens: int = 4, *, priority: int = 0, group: str = "") -> Request:
    ids = tuple(random.Random(name[:1]).choices(range(VOCAB), k=prompt))
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return Request(id=name, prompt=ids, params=params, key=NoiseKey(0), priority=priority, group=group)


def urgent(target: Engine, keep: int) -> Iterator[list[Event]]:
    """Steps of an engine to which urgent requests never stop coming: ``keep`` are always there."""
    added = ended = 0
    while True:
        for number in range(added, ended + keep):
            target.add(request(f"u{number}", tokens=30), PLAIN)
            added += 1
        events = target.step()
        ended += sum(event.finish_reason is not None and event.request.startswith("u") for event in events)
        yield events


def run(target: Engine, most: int = 2000) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    for _ in range(most):
        if target.idle:
            return texts
        for event in target.step():
            assert event.error is None
            texts.setdefault(event.request, []).extend(committed([event]))
        target.runner.check()
    raise AssertionError("the engine makes no progress")


def alone(one: Request) -> list[int]:
    target = engine()
    target.add(one, PLAIN)
    return run(target)[one.id]


@pytest.mark.parametrize(("levels", "patience"), [(1, 4), (3, 4), (2, 16)])
def test_urgent_requests_without_end_overtake_a_plain_one_no_more_often_than_said(levels: int, patience: int) -> None:
    target = engine(max_sequences=1, patience=patience)
    target.add(request("plain", priority=levels), PLAIN)
    before = 0
    for events in urgent(target, keep=3):
        if any(event.request == "plain" for event in events):  # it has started
            break
        before += sum(event.finish_reason is not None for event in events)
    assert before == levels * patience - 1


def test_a_preempted_request_ends_although_urgent_ones_never_stop() -> None:
    target = engine(ToyRunner(LOGITS, VOCAB, capacity=44), patience=6)
    one = request("plain", prompt=10, tokens=30, priority=1)
    target.add(one, PLAIN)
    text = committed(target.step())
    for events in urgent(target, keep=8):
        mine = [event for event in events if event.request == "plain"]
        text += committed(mine)
        if mine and mine[-1].finish_reason:
            break
    assert target.scheduler.preemptions > 0
    assert text == alone(one)


def test_who_decodes_commits_in_each_step_while_long_prompts_are_fed() -> None:
    runner = Watched(LOGITS, VOCAB)
    target = engine(runner, max_sequences=4, max_rows=6)
    for name in "ab":
        target.add(request(name, tokens=40), PLAIN)
    target.step()
    for name in "cd":
        target.add(request(name, prompt=70, tokens=2), PLAIN)
    prefills, told = 0, set[str]()
    while "c" not in told:
        told = {event.request for event in target.step() if event.committed}
        assert {"a", "b"} <= told
        prefills += 1
    assert prefills > 70 // 4
    assert runner.rows == 6


@pytest.mark.parametrize("cut", [1, 5], ids=["any rows", "snapshots"])
@pytest.mark.parametrize("seed", range(5))
def test_small_memory_changes_no_text_and_nobody_has_two_turns_in_a_step(seed: int, cut: int) -> None:
    chance = random.Random(seed)
    target = engine(ToyRunner(LOGITS, VOCAB, capacity=66, cut=cut), max_rows=40)
    wanted = [
        request(f"{number}", chance.randint(1, 20), chance.randint(25, 45), priority=chance.randint(0, 2))
        for number in range(12)
    ]
    for one in wanted:
        target.add(one, chance.choice([PLAIN, ORACLE]))
    assert run(target) == {one.id: alone(one) for one in wanted}
    assert target.scheduler.preemptions > 0


@pytest.mark.parametrize("before", [0, 5], ids=["comes meanwhile", "is preempted"])
def test_memory_that_an_embedding_holds_for_a_while_fails_no_request(before: int) -> None:
    runner = ToyRunner(LOGITS, VOCAB, capacity=40)
    target, one = engine(runner), request("a", prompt=10, tokens=20)
    target.add(one, PLAIN)
    text = [token for _ in range(before) for token in committed(target.step())]
    runner.open(-1, (0,))
    assert runner.reserve(-1, runner.free_tokens())
    for _ in range(4):
        text += committed(target.step())
    assert not target.scheduler.running
    runner.release(-1)
    assert text + run(target)["a"] == alone(one)


def test_who_waits_for_memory_is_not_opened_at_each_step() -> None:
    runner = Watched(LOGITS, VOCAB, capacity=60)
    target = engine(runner)
    target.add(request("a", prompt=20, tokens=30), PLAIN)
    target.add(request("b", prompt=40, tokens=5), PLAIN)
    run(target)
    assert runner.opened == 3


def test_samples_of_one_prompt_share_it_and_the_counters_say_so() -> None:
    target = engine()
    for index in range(4):
        target.add(request(f"s{index}", prompt=20, group="s"), PLAIN)
    run(target)
    stats = target.stats()
    assert (stats.prefix_tokens_asked, stats.prefix_tokens_found) == (80, 3 * 19)


def test_stats_tell_what_is_there_and_what_has_been() -> None:
    runner = ToyRunner(LOGITS, VOCAB, capacity=40)
    target = engine(runner, max_sequences=2)
    for name in "abc":
        target.add(request(name, tokens=20), PLAIN)
    target.step()
    stats = target.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    assert stats.cache_tokens_used == stats.cache_tokens_total - runner.free_tokens() > 0
    target.abort("c")
    run(target)
    stats = target.stats()
    assert stats.finished == {"length": 2, "abort": 1}
    assert stats.preemptions == target.scheduler.preemptions > 0
    assert (stats.running, stats.waiting, stats.cache_tokens_used) == (0, 0, 0)
    assert stats.prefix_tokens_asked == 6  # what a preempted one finds of itself again counts for nothing


def test_an_engine_that_nobody_uses_gives_back_its_runner_at_once() -> None:
    """Nothing in it refers back to it: a server that unloads a model frees its memory then."""
    gc.disable()
    try:
        used = engine()
        used.add(request("a"), PLAIN)
        while not used.idle:
            used.step()
        runner = weakref.ref(used.runner)
        del used
        assert runner() is None
    finally:
        gc.enable()
