"""The target's own layers in the hands of a drafter: who may have them, how far, what is counted, what is left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from parlay.engine import Engine, Limits
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import reference
from parlay.testing.conformance.stage import StageRequest, StageSample, Steady, decode
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import Draft, DraftForm, Needs, Observation, SamplingParams, SequenceView, Skip, Strategy, trees

LOGITS = RandomLogits(24)
NONE: Skip = frozenset()
SOME: Skip = frozenset({("attention", 1), ("mlp", 2)})
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)

Guess = Callable[[SequenceView, int], list[int]]


class Asking:
    """Drafts what ``guess`` says."""

    needs = Needs(layers=True)

    def __init__(self, guess: Guess) -> None:
        self._guess = guess

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        pairs = zip(views, budgets, strict=True)
        return [trees.chain(self._guess(view, budget), "asking") for view, budget in pairs]

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def release(self, sequence: int) -> None: ...


def strategy(guess: Guess, budget: int = 4) -> Strategy:
    return Strategy("asking", (Asking(guess),), SharedNoise(), Fixed(budget))


def writes(skip: Skip, stop: int = 100) -> Guess:
    """The likeliest tokens, one by one."""

    def guess(view: SequenceView, budget: int) -> list[int]:
        assert view.layers is not None
        path: list[int] = []
        while len(path) < min(budget, stop):
            path.append(int(view.layers.forward([view], [path], DraftForm(skip))[0].argmax()))
        return path

    return guess


def run(
    guess: Guess, capacity: int = 4096, budget: int = 4, asks: int = 1, limits: Limits | None = None
) -> list[StageSample]:
    """Decode and hold the text against the reference's; afterwards the whole cache is free."""
    runner = ToyRunner(LOGITS, 24, capacity=capacity)
    given = [StageRequest((3, 1, 4 + index), replace(GREEDY, max_tokens=20 + index)) for index in range(asks)]
    samples = decode(runner, [(ask, strategy(guess, budget)) for ask in given], limits)
    for ask, sample in zip(given, samples, strict=True):
        assert sample.tokens == reference.decode(LOGITS, ask.request("expected")).output
    assert runner.free_tokens() == capacity, "room is not given back"
    return samples


def test_with_nothing_skipped_every_draft_is_accepted() -> None:
    """The last step commits what is left of 20."""
    (sample,) = run(writes(NONE))
    assert sample.steps == [5, 5, 5, 5]
    (sample,) = run(writes(NONE), budget=2)  # the prompt of 3 is longer than a draft, so it is not run twice
    assert sample.steps == [1, 3, 3, 3, 3, 3, 3, 1]


def test_rows_and_seconds_are_counted() -> None:
    """A chain costs its pending rows once and each drafted token once, its last one excepted."""
    (sample,) = run(writes(NONE))
    metrics = sample.metrics
    assert metrics.layer_rows == (3 + 3) + 3 * (1 + 3)
    assert 0 < metrics.layer_seconds <= metrics.draft_seconds + metrics.prefill_seconds
    (sample,) = run(lambda view, budget: [])
    assert (sample.metrics.layer_rows, sample.metrics.layer_seconds) == (0, 0.0)


def test_what_lies_in_scratch_serves_the_same_skip_and_the_same_tokens_only() -> None:
    """The toy's logits come of every token before: a row from another path, or another skip, would show."""

    def guess(view: SequenceView, budget: int) -> list[int]:
        assert view.layers is not None
        text = list(view.tokens)
        if budget < 4:
            return []

        def check(path: list[int], skip: Skip, rows: int = 1) -> None:
            assert view.layers is not None
            got = view.layers.forward([view], [path], DraftForm(skip), rows)
            whole = [*text, *path]
            for row, end in zip(got, range(len(whole) - rows + 1, len(whole) + 1), strict=True):
                known = LOGITS(whole[:end])
                assert torch.equal(row, known) if not skip else not torch.equal(row, known)

        for path in ([1], [1, 2], [1, 3, 4], [1], [], [5, 2]):
            check(path, NONE)
        check([5, 2], SOME)
        check([5, 2, 1], NONE)
        check([5, 2], NONE, rows=min(6, len(text)))
        check([5, 2, 1, 1], NONE)
        return [1]

    (sample,) = run(guess)
    assert sample.metrics.drafter_faults == 0


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_drafter_that_stops_half_way_or_breaks_leaves_nothing_behind(stop: int) -> None:
    run(writes(SOME, stop))

    def breaks(view: SequenceView, budget: int) -> list[int]:
        path = writes(SOME, stop)(view, budget)
        raise RuntimeError(f"broken after {len(path)}")

    (sample,) = run(breaks)
    assert sample.metrics.drafter_faults == 1


@pytest.mark.parametrize("capacity", [48, 60, 75, 96])
def test_scratch_never_takes_the_room_of_a_verify(capacity: int) -> None:
    """Little memory and greedy drafters: shorter drafts, waiting, preemption, and the same texts."""
    run(writes(SOME), capacity=capacity, budget=16, asks=4, limits=Limits(max_sequences=4, max_rows=16))


def test_layers_can_be_used_in_propose_only_and_within_the_budget() -> None:
    seen: list[SequenceView] = []

    def guess(view: SequenceView, budget: int) -> list[int]:
        assert view.layers is not None
        if seen:
            seen[0] = view
        else:
            seen.append(view)
        for path, rows, words in (
            ([1] * (budget + 1), 1, "at most"),
            ([], 0, "at least one row"),
            ([], len(view.tokens) + 1, "rows at the end"),
        ):
            with pytest.raises(ValueError, match=words):
                view.layers.forward([view], [path], rows=rows)
        with pytest.raises(ValueError, match="given twice"):
            view.layers.forward([view, view], [[], []])
        return []

    (sample,) = run(guess)
    assert sample.metrics.drafter_faults == 0
    assert seen[0].layers is not None
    with pytest.raises(ValueError, match="in propose only"):
        seen[0].layers.forward([seen[0]], [[]])


def test_who_does_not_ask_gets_none() -> None:
    class Modest(Asking):
        needs = Needs()

    def guess(view: SequenceView, budget: int) -> list[int]:
        assert view.layers is None
        return []

    runner = ToyRunner(LOGITS, 24)
    modest = Strategy("modest", (Modest(guess),), SharedNoise(), Fixed(4))
    (sample,) = decode(runner, [(StageRequest((3, 1, 4), GREEDY), modest)])
    assert sample.metrics.drafter_faults == 0


def test_a_runner_that_can_not_skip_is_named_with_the_strategy() -> None:
    """Nothing is ignored silently."""
    runner = ToyRunner(LOGITS, 24)
    runner.spec = replace(runner.spec, layer_skip=False, name="stiff")
    engine = Engine(runner, Steady())
    with pytest.raises(ValueError, match=r"strategy asking .* runner of stiff can't skip"):
        engine.add(StageRequest((3, 1, 4), GREEDY).request("r"), strategy(writes(NONE)))
    assert engine.idle
