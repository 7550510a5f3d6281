"""Drafting while the target verifies, on threads of one process: texts, memory, errors, and what is left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

import pytest
import torch

from parlay.drafters.draft_models.beside import ModelBeside
from parlay.drafters.draft_models.parallel_draft import ParallelDraft
from parlay.drafters.resources import Resources
from parlay.engine import Engine
from parlay.models.beside import GrowthBeside
from parlay.models.compiled.growing import GrowthCall
from parlay.models.forward import GrownTree
from parlay.models.native import NativeRunner
from parlay.options import UsageError
from parlay.router.policies import Plain
from parlay.sampling.rules import SharedNoise
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.system import threads
from parlay.testing.conformance import KitLength, default_stages, run_check, subject_of
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import ToyRunner
from parlay.types import (
    Request,
    SamplingParams,
    Strategy,
)
from tests.drafters import test_grown_drafts as grown
from tests.drafters.sight import GREEDY, Sight, propose
from tests.drafters.virtual_drafting import (
    options,
    plain,
    request,
    run,
    strategy,
)
from tests.engine.toy_engine import LOGITS, VOCAB


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threads.using(2):
        yield


def on_threads(runner: NativeRunner, settings: str, stack: ExitStack) -> ParallelDraft:
    resources = Resources(grown.VOCAB, lambda name: runner, default_draft="tiny", closing=stack)
    form = [] if "form=" in settings else ["form=pearl"]
    text = ",".join(["min_p=0", *form, *filter(None, [settings])])
    return cast(ParallelDraft, build(parse(f"parallel-draft:{text}"), resources))


def native_texts(how: Callable[[], Strategy], asked: Sequence[Request]) -> dict[str, list[int]]:
    shared = how()
    return run(Engine(grown.tiny(), Steady()), [(one, shared) for one in asked])


LONG = replace(GREEDY, params=SamplingParams(temperature=0, max_tokens=500))
NATIVE = [request(str(seed), seed, tokens=30, temperature=0.7 * (seed % 2)) for seed in range(3)]


def delayed(monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    """Growths take random times, on whichever thread."""
    grow = GrowthCall.run

    def run(self: GrowthCall) -> list[GrownTree]:
        threading.Event().wait(chance.choice((0.0, 0.0, 0.002, 0.005)))
        return grow(self)

    monkeypatch.setattr(GrowthCall, "run", run)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("settings", ["tokens=0", "form=amusd", "ahead=4,tokens=0", "form=auto"])
def test_texts_on_threads_are_those_of_plain_decoding(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = native_texts(lambda: Strategy("none", (), SharedNoise(), Plain()), NATIVE)
    delayed(monkeypatch, random.Random(3))
    before = {*threading.enumerate()}
    with ExitStack() as stack:
        runner = grown.tiny()
        assert native_texts(lambda: strategy(on_threads(runner, settings, stack)), NATIVE) == expected
        runner.check()
        assert not runner.store._live
    assert threads.count() == 2
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("parlay-beside")]


@pytest.mark.usefixtures("two_threads")
def test_drafts_made_beside_are_those_made_alone() -> None:
    """Of a draft's tokens each is what the draft model would write there, whenever it was written."""
    with ExitStack() as stack:
        drafter, loop = on_threads(grown.tiny(), "tokens=0,ahead=5", stack), grown.by_the_loop("min_p=0")
        view, sizes = Sight(0, [1, 5, 9], replace(GREEDY, params=SamplingParams(temperature=0.8, max_tokens=500))), []
        for right in (9, 9, 0, 9, 2, 9, 9):
            draft = propose(drafter, view, 6)
            true = propose(loop, replace(view, tokens=list(view.tokens)), 8).tree.tokens
            assert draft.tree.tokens == true[: len(draft)]
            sizes.append(len(draft))
            right = min(right, len(draft))
            view.tokens += [*true[:right], true[right] if right == len(draft) else (true[right] + 1) % grown.VOCAB]
        assert sizes == [6, 4, 4, 0, 4, 0, 4]
        drafter.release(0)


@pytest.mark.usefixtures("two_threads")
def test_the_target_may_take_the_memory_of_a_draft_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    delayed(monkeypatch, random.Random(3))
    with ExitStack() as stack:
        runner = grown.tiny()
        drafter, view = (
            on_threads(runner, "tokens=0", stack),
            Sight(0, [1, 5, 9], LONG),
        )
        for _ in range(8):
            draft = propose(drafter, view, 6)
            assert runner.store.beside is not None
            assert runner.store.drop_used()
            assert runner.store.beside is None
            runner.check()
            view.tokens += [*draft.tree.tokens, 7]


@pytest.mark.usefixtures("two_threads")
def test_another_drafter_may_use_the_model_meanwhile() -> None:
    with ExitStack() as stack:
        runner = grown.tiny()
        drafter, other = on_threads(runner, "tokens=0", stack), grown.drafter_on(runner, "min_p=0,tokens=0")
        alone = grown.drafter_on(grown.tiny(), "min_p=0,tokens=0")
        mine, theirs = Sight(0, [1, 5, 9]), Sight(1, [4, 5])
        for _ in range(8):
            draft = propose(drafter, mine, 6)
            assert propose(other, theirs, 5).tree == propose(alone, replace(theirs), 5).tree
            mine.tokens += [*draft.tree.tokens[:3], 7]
            theirs.tokens += [8, 3]


@pytest.mark.usefixtures("two_threads")
def test_a_thread_that_raises_costs_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = native_texts(lambda: Strategy("none", (), SharedNoise(), Plain()), NATIVE)
    grow = GrowthCall.run

    def run(self: GrowthCall) -> list[GrownTree]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no luck")
        return grow(self)

    monkeypatch.setattr(GrowthCall, "run", run)
    with ExitStack() as stack:
        assert native_texts(lambda: strategy(on_threads(grown.tiny(), "", stack)), NATIVE) == expected
    assert threads.count() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_aborted_request_ends_its_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    delayed(monkeypatch, random.Random(5))
    with ExitStack() as stack:
        runner, engine = grown.tiny(), Engine(grown.tiny(), Steady())
        engine.add(NATIVE[0], strategy(on_threads(runner, "", stack)))
        engine.step()
        assert runner.store.beside is not None
        engine.abort(NATIVE[0].id)
        assert runner.store.beside is None
        assert not runner.store._live
        assert engine.idle


def test_a_growth_that_is_told_to_stop_runs_no_further_level(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = GrowthCall.run

    def run(self: GrowthCall) -> list[GrownTree]:
        self.stop()
        return grow(self)

    monkeypatch.setattr(GrowthCall, "run", run)
    with ExitStack() as stack:
        beside = ModelBeside(
            Resources(grown.VOCAB, lambda name: grown.tiny(), "tiny", closing=stack), options(min_p=0.0)
        )
        beside.begin([Sight(0, [1, 2, 3])], [8])
        assert len(beside.end(stop=False).chains[0].tokens) == 1


def test_requests_whose_logits_are_edited_are_drafted_for_before_the_forward() -> None:
    params = SamplingParams(temperature=0, logit_bias={42: 100.0})
    with ExitStack() as stack:
        drafter = on_threads(grown.tiny(), "", stack)
        view = Sight(0, [1, 2, 3], replace(GREEDY, params=params))
        assert propose(drafter, view, 4).tree.tokens == (42,) * 4
        assert not drafter.is_drafting


def test_another_decoder_drafts_before_the_forward_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    draft = ToyRunner(LOGITS, VOCAB)
    drafter = ParallelDraft(Resources(VOCAB, lambda name: draft, "toy", closing=ExitStack()), options())
    assert "drafts before each forward, not during it" in caplog.text
    assert run(Engine(ToyRunner(LOGITS, VOCAB), Steady()), [(request(), strategy(drafter))]) == plain([request()])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"threads": 2}, "leaves none of 2 to the target"),
        ({"form": "amusd", "ahead": 3}, "remove ahead"),
        ({"url": "http://127.0.0.1:1", "model": "tiny"}, "remove one of them"),
    ],
)
def test_what_can_not_be_is_one_line(values: dict[str, object], words: str) -> None:
    resources = Resources(grown.VOCAB, lambda name: grown.tiny(), "tiny", closing=ExitStack())
    with pytest.raises(UsageError, match=words):
        ParallelDraft(resources, options(**values))


def test_lent_threads_come_back() -> None:
    with threads.using(4):
        threads.lend(1)
        assert threads.count() == 3
        threads.lend(7)
        assert threads.count() == 1
        threads.take_back(7)
        threads.take_back(1)
        assert threads.count() == 4
    assert torch.get_num_threads() >= 1


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("check", ["mixed", "forks", "preemption"])
def test_it_passes_the_kit_on_threads(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft model that the compiled decoder runs: growths go on beside the target's forwards."""
    delayed(monkeypatch, random.Random(4))
    begun = []
    monkeypatch.setattr(GrowthBeside, "end", counted(GrowthBeside.end, begun))
    run_check(
        check,
        subject_of("parallel-draft:form=pearl"),
        default_stages()["native float32"],
        KitLength(tokens=24, draws=0),
    )
    assert begun


def counted(end: Callable[..., None], calls: list[bool]) -> Callable[..., None]:
    def counting(self: GrowthBeside, *, stop: bool = False) -> None:
        calls.append(stop)
        end(self, stop=stop)

    return counting
