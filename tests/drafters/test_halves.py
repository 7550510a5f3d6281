"""Drafting for one half of a batch while the other is verified, and choosing when to draft: in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from itertools import pairwise

import pytest

from parlay.drafters.draft_models.parallel_draft import ParallelDraft
from parlay.engine import Engine, Limits
from parlay.models.beside import GrowthBeside
from parlay.router.arms import Arm
from parlay.router.policies import Fixed
from parlay.router.router import Router
from parlay.sampling.rules import SharedNoise
from parlay.system import threads
from parlay.testing import toy_drafters
from parlay.testing.conformance.stage import Steady
from parlay.testing.toy_drafters import ToyDrafter
from parlay.testing.toys import ToyRunner
from parlay.types import Cost, SequenceView, Strategy
from tests.drafters import test_grown_drafts as grown
from tests.drafters.test_drafting_on_threads import NATIVE, native_texts, on_threads
from tests.drafters.test_parallel_draft import Erratic, Unsteady
from tests.drafters.virtual_drafting import (
    MOSTLY,
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
from tests.engine.toy_engine import ANSWER, LOGITS, PLAIN, VOCAB, committed

BUDGET, TEXTS = 4, 8


class Priced(Steady):
    """Forwards cost what they take on the virtual clock when nothing else runs."""

    def __init__(self, fixed: float, row: float) -> None:
        self._fixed, self._row = fixed, row

    def forward(self, rows: int, context: int) -> float:
        return self._fixed + self._row * rows


class World:
    """An engine on a virtual clock of known prices, and a drafter in it."""

    def __init__(
        self, token: float, fixed: float, row: float, *, toy: ToyDrafter = MOSTLY, contention: float = 1, form: str = ""
    ) -> None:
        self.time, self.cost = Time(), Priced(fixed, row)
        self.drafting = VirtualDrafting(toy, self.time, token, contention)
        self.drafter = ParallelDraft(toy_resources(), options(form=form or "pearl"), drafting=self.drafting)
        self.runner = TimedRunner(self.time, fixed, row)
        self.engine = Engine(self.runner, self.cost, clock=lambda: self.time.now)

    def steps(self, texts: int = TEXTS, tokens: int = 120) -> list[float]:
        """Virtual seconds of each step; all texts are those of plain decoding."""
        asked = [request(str(seed), seed, tokens) for seed in range(texts)]
        how, ends = strategy(self.drafter, BUDGET), [self.time.now]
        written: dict[str, list[int]] = {one.id: [] for one in asked}
        for one in asked:
            self.engine.add(one, how)
        while not self.engine.idle:
            for event in self.engine.step():
                written[event.request] += committed([event])
            ends.append(self.time.now)
        assert written == plain(asked)
        return [after - before for before, after in pairwise(ends)]


@pytest.mark.parametrize("drafting", [0.5, 1.0, 1.4], ids=["quick drafter", "balanced", "slow drafter"])
def test_the_step_of_a_half_takes_as_long_as_the_slower_of_drafting_and_verifying(drafting: float) -> None:
    """Within 2 percent; so a pair of steps is as long as both halves take on the resource that has more to do."""
    rows = TEXTS // 2 * (1 + BUDGET)
    world = World(token=drafting * rows * 0.1 / BUDGET, fixed=0.0, row=0.1)
    steps, sizes = world.steps(), world.runner.sizes
    first = sizes.index(TEXTS // 2) + 2  # behind the steps that verify what was drafted for all
    assert set(sizes[first : first + 30]) == {TEXTS // 2}
    assert steps[first : first + 30] == pytest.approx([max(drafting, 1.0) * rows * 0.1] * 30, rel=0.02)


def test_halves_save_what_is_drafted_in_vain() -> None:
    """A forward of half the rows takes half as long here, and drafts behind wrong tokens are never written."""
    halves, whole = (World(token=0.5, fixed=0.0, row=0.1) for _ in range(2))
    whole.drafter.halves_pay = lambda *args, **kwargs: False  # type: ignore[method-assign]
    assert sum(halves.steps()) < 0.92 * sum(whole.steps())
    assert set(whole.runner.sizes[1:30]) == {TEXTS}


@pytest.mark.parametrize(("fixed", "row"), [(4.0, 0.0), (3.0, 0.02)], ids=["rows cost nothing", "rows cost little"])
def test_a_batch_stays_whole_where_a_half_costs_nearly_as_much(fixed: float, row: float) -> None:
    world = World(token=0.5, fixed=fixed, row=row)
    world.steps()
    assert set(world.runner.sizes[1:20]) == {TEXTS}


def test_other_texts_and_prompts_keep_the_batch_whole() -> None:
    """A text that is not drafted for takes part in every step, and so do all while a prompt is read."""
    world = World(token=0.25, fixed=0.0, row=0.1)
    for seed in range(3):
        world.engine.add(request(str(seed), seed, 40), strategy(world.drafter, BUDGET))
    world.engine.add(request("plain", 9, 60), PLAIN)
    while not world.engine.idle:
        world.engine.step()
    assert set(world.runner.sizes[:10]) == {4}


class Moody(ParallelDraft):
    """Wants halves or not as chance has it."""

    chance = random.Random(0)

    def halves_pay(self, views: Sequence[SequenceView], whole: float, half: float, *, now: bool) -> bool:
        return self.chance.random() < (0.9 if now else 0.5)


@pytest.mark.parametrize(("form", "fails"), [("pearl", 0.0), ("pearl", 0.04), ("amusd", 0.0), ("auto", 0.04)])
def test_texts_are_those_of_plain_decoding_whoever_waits_for_a_turn(form: str, fails: float) -> None:
    """Requests come and go, are aborted while they wait or are drafted for, or put back; drafters are late or fail."""
    turns = 0
    for seed in range(4):
        chance = Moody.chance = random.Random(seed)
        toy = toy_drafters.sometimes(ANSWER, VOCAB, [chance.random() < 0.8 for _ in range(17)])
        drafter = Moody(toy_resources(), options(form=form), drafting=Unsteady(toy, chance, fails))
        how = Strategy("parallel-draft", (drafter,), SharedNoise(), Erratic(chance, (0, 3, 7, 7, 7, 7, 7, 7)))
        asked = [request(str(number), seed * 8 + number, chance.randrange(5, 40)) for number in range(7)]
        engine = Engine(ToyRunner(LOGITS, VOCAB, capacity=220), Steady(), Limits(max_rows=40))
        texts: dict[str, list[int]] = {one.id: [] for one in asked}
        waiting = list(asked)
        while waiting or not engine.idle:
            if waiting and chance.random() < 0.5:
                engine.add(waiting.pop(), how)
            for event in engine.step():
                texts[event.request] += [each.token for each in event.committed]
            turns += bool(drafter._waiting) or drafter._last.halves
            if chance.random() < 0.04:
                engine.abort(chance.choice(asked).id)
        for name, text in plain(asked).items():
            assert texts[name] == text[: len(texts[name])]
        assert not drafter._guesses
        assert not drafter.is_drafting
        assert not drafter._waiting
    assert turns > 20


def test_halves_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled draft model writes for one half on a thread of its own; its memory is whole afterwards."""
    monkeypatch.setattr(ParallelDraft, "halves_pay", lambda *args, **kwargs: True)
    ended: list[int] = []
    end = GrowthBeside.end
    monkeypatch.setattr(GrowthBeside, "end", lambda self, **how: (ended.append(1), end(self, **how))[1])
    expected = native_texts(lambda: PLAIN, NATIVE)
    with threads.using(2), ExitStack() as stack:
        runner = grown.tiny()
        assert native_texts(lambda: strategy(on_threads(runner, "tokens=0", stack), BUDGET), NATIVE) == expected
        runner.check()
        assert not runner.store._live
    assert len(ended) > 5


# ------------------------------------------------------------------------------------------------ before or during


OFTEN = toy_drafters.sometimes(ANSWER, VOCAB, [random.Random(place).random() < 0.8 for place in range(97)])


@cache
def seconds(form: str, contention: float, token: float, policy: str = "router") -> float:
    """Of texts one after another, each of them that of plain decoding. ``draft-model``: never during forwards."""
    world = World(token, 6.0, 0.0, toy=OFTEN, contention=contention, form="auto" if form == "draft-model" else form)
    if form == "draft-model":
        world.drafting.beside = lambda view: False  # type: ignore[method-assign]
    cost: Cost = world.cost
    how = Strategy("auto", (world.drafter,), SharedNoise(), Router(cost, [Arm("parallel-draft", 8)]))
    if policy == "fixed":
        how = Strategy("auto", (world.drafter,), SharedNoise(), Fixed(4))
    asked = [request(str(seed), seed, 200) for seed in range(2)]
    for one in asked:
        assert run(world.engine, [(one, how)]) == plain([one])
    return world.time.now


@pytest.mark.parametrize(("token", "policy"), [(0.5, "router"), (1.5, "router"), (1.5, "fixed")])
def test_it_drafts_during_forwards_where_the_drafter_has_resources_of_its_own(token: float, policy: str) -> None:
    auto, pearl, serial = (seconds(form, 1.0, token, policy) for form in ("auto", "pearl", "draft-model"))
    assert auto < 1.05 * min(pearl, serial)


@pytest.mark.parametrize(("token", "policy"), [(0.5, "router"), (1.5, "router"), (1.5, "fixed")])
def test_it_loses_nothing_by_it_where_they_share_them(token: float, policy: str) -> None:
    """Both take 1.9 times as long beside each other, as on two shared cores. Two steps find that out, for hundreds."""
    auto, pearl = (seconds(form, 1.9, token, policy) for form in ("auto", "pearl"))
    serial = seconds("draft-model", 1.0, token, policy)  # where nothing is beside anything
    assert auto < serial + 3 * (6.0 + 8 * token)
    assert pearl > 1.1 * serial
