"""Tests a strategy under a server's conditions: little memory, forks, chunked prefill, failing drafters, aborts,
pauses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parlay.engine import Engine, Limits
from parlay.router.policies import Fixed
from parlay.testing.conformance.compare import Excuse
from parlay.testing.conformance.stage import Stage, StageRequest, Steady, Subject, decode
from parlay.testing.conformance.universal import CAPACITY, GREEDY, VARIETY, KitLength, agree, prompt
from parlay.testing.conformance.watched import watched as under_observation
from parlay.testing.toy_drafters import Raising
from parlay.types import Budgets, Drafter, SequenceView, Strategy


def continuing(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """U5: a text that reuses cache entries of an earlier text is the same as after a fresh prefill."""
    strategy = subject.strategy(stage, 6)
    runner = stage.open_runner(CAPACITY)
    first = StageRequest(prompt(stage, 11, 24), replace(VARIETY[1], max_tokens=30), seed=5)
    (sample,) = decode(runner, [(first, strategy)])
    whole = first.prompt + tuple(sample.tokens)
    excuses: list[Excuse] = []
    for start in (whole, whole[:-7], whole[:20], (*first.prompt, 0, 1, *whole[30:])):
        for params in (GREEDY, VARIETY[0]):
            ask = StageRequest(start, replace(params, max_tokens=effort.tokens // 8), seed=6)
            excuses += agree(stage, [(ask, strategy)], runner=runner)
    return excuses


def forks(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """Samples of one prompt share the prompt's cache, and each gives the text of its own sample index."""
    strategy = subject.strategy(stage, 5)
    asks = [
        StageRequest(prompt(stage, 13, 37), replace(VARIETY[0], max_tokens=18 + index), 9, index, group="siblings")
        for index in range(5)
    ]
    return agree(stage, [(ask, strategy) for ask in asks], Limits(max_sequences=4))


def chunks(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """Long prompts are prefilled a few rows at a time, in the same steps in which other sequences decode."""
    strategy = subject.strategy(stage, 4)
    jobs = [
        (
            StageRequest(prompt(stage, 17 + length, length), replace(VARIETY[length % 3], max_tokens=12), seed=length),
            strategy,
        )
        for length in (1, 90, 6, 61)
    ]
    return agree(stage, jobs, Limits(max_sequences=4, max_rows=7, max_draft_rows=6))


def preemption(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """The cache holds about two of six sequences: some wait, some are preempted, and no text changes."""
    strategy = subject.strategy(stage, 6)
    jobs = [
        (
            StageRequest(
                prompt(stage, 19 + index, 20 + 9 * index), replace(VARIETY[index], max_tokens=effort.tokens // 4), index
            ),
            strategy,
        )
        for index in range(6)
    ]
    return agree(stage, jobs, Limits(max_rows=48), capacity=208)


CONTEXT = 48


def context(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """Texts reach the end of the context: no draft goes beyond it, and none of the last tokens is lost.

    The drafter must propose something: the texts repeat themselves, and one has a reference that contains the whole
    text. A drafter that proposes nothing would pass all other checks untested.
    """
    strategy, limits = subject.strategy(stage, 5), Limits(max_context=CONTEXT)
    asks = [
        StageRequest(prompt(stage, 37 + length, length), replace(params, max_tokens=2 * CONTEXT), seed=length)
        for params, length in ((GREEDY, 20), (VARIETY[0], 31), (VARIETY[2], CONTEXT - 1))
    ]
    told = replace(asks[1], references=(tuple(stage.expected(asks[1], CONTEXT).tokens),))
    watched, seen = under_observation(strategy)
    excuses = agree(stage, [(ask, watched) for ask in (*asks, told)], limits)
    silent = seen and stage.open_runner(CAPACITY).spec.tree != "none" and not any(each.nodes for each in seen)
    assert not silent, "it proposed nothing in texts that repeat themselves: no check here tests it"
    return excuses


def references(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """References that contain the text, a part of it, another text, or nothing do not change the text."""
    strategy = subject.strategy(stage, 8)
    base = StageRequest(prompt(stage, 23, 15), replace(VARIETY[0], max_tokens=40), seed=2)
    text = tuple(stage.expected(base).output)
    given = ((base.prompt + text,), (text[10:20], ()), (prompt(stage, 24, 50),), ((0,),))
    return agree(stage, [(replace(base, references=one), strategy) for one in given])


def failures(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """If a drafter raises, at once or later, its requests lose their drafts and nothing else."""
    excuses: list[Excuse] = []
    healthy = subject.strategy(stage, 4)
    for at in (0, 3):
        for where in ("propose", "observe"):
            broken = _broken(subject.strategy(stage, 4), at, where)
            jobs = [
                (
                    StageRequest(
                        prompt(stage, 29 + index, 21), replace(VARIETY[index], max_tokens=effort.tokens // 8), index
                    ),
                    strategy,
                )
                for index, strategy in enumerate((broken, healthy, broken))
            ]
            excuses += agree(stage, jobs, faults=True)
    return excuses


def interruptions(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """A request is aborted, and sent again. For some steps its drafter is not asked, and does not observe all of
    them."""
    strategy, runner = subject.strategy(stage, 4), stage.open_runner(CAPACITY)
    ask = StageRequest(prompt(stage, 31, 33), replace(VARIETY[0], max_tokens=30), seed=3)
    engine = Engine(runner, Steady())
    engine.add(ask.request("aborted"), strategy)
    for _ in range(4):
        engine.step()
    engine.abort("aborted")
    runner.check()
    if strategy.drafters:
        strategy = replace(strategy, policy=Pausing(4, range(4, 10)))
    other = StageRequest(prompt(stage, 32, 12), replace(VARIETY[1], max_tokens=25), seed=4)
    return agree(stage, [(ask, strategy), (other, strategy)], runner=runner)


class Pausing(Fixed):
    """A policy under which no drafter drafts in some steps, counted from 1."""

    def __init__(self, budget: int, pauses: range) -> None:
        super().__init__(budget)
        self._pauses, self._step = pauses, 0

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        self._step += 1
        return Budgets([0] * len(views)) if self._step in self._pauses else super().plan(views)


def _broken(strategy: Strategy, at: int, where: str) -> Strategy:
    drafters: tuple[Drafter, ...] = tuple([Raising(drafter, at, where) for drafter in strategy.drafters])
    return replace(strategy, drafters=drafters)
