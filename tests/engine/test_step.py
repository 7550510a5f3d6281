"""The engine's promises beside exactness: who runs when, what is counted, and that no fault spreads."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import parlay.engine
from parlay.engine import Engine
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.toys import ToyRunner, nan_after
from parlay.types import (
    NO_DRAFT,
    NO_SKIP,
    Draft,
    Drafter,
    Event,
    Needs,
    NoiseKey,
    Observation,
    Request,
    SamplingParams,
    SequenceView,
    Strategy,
    Tree,
)
from tests.engine.toy_engine import ANSWER, LOGITS, PLAIN, VOCAB, committed, engine


def request(name: str, prompt: int = 3, tokens: int = 8, **fields: object) -> Request:
    params = SamplingParams(temperature=0, max_tokens=tokens, **fields.pop("params", {}))  # type: ignore[arg-type]
    return Request(id=name, prompt=tuple(range(1, prompt + 1)), params=params, key=NoiseKey(0), **fields)  # type: ignore[arg-type]


def drafting(drafter: Drafter, budget: int = 4) -> Strategy:
    return Strategy("drafting", (drafter,), SharedNoise(), Fixed(budget))


def run(target: Engine, most: int = 500) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {}
    for _ in range(most):
        if target.idle:
            return events
        for event in target.step():
            events.setdefault(event.request, []).append(event)
    raise AssertionError("the engine makes no progress")


def alone(one: Request, strategy: Strategy = PLAIN) -> list[int]:
    target = engine()
    target.add(one, strategy)
    return committed(run(target)[one.id])


def test_the_step_reads_on_half_a_screen() -> None:
    body = ast.parse(textwrap.dedent(inspect.getsource(Engine.step))).body[0]
    assert isinstance(body, ast.FunctionDef)
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(body)) <= 15


def test_more_drafting_sequences_than_draft_rows_use_all_rows_in_each_step() -> None:
    """The first in rank draft a node each, instead of nobody."""
    target = engine(max_draft_rows=2)
    for name in "abc":
        target.add(request(name, tokens=20), drafting(toy_drafters.oracle(ANSWER)))
    for _ in range(3):
        target.step()  # prefill
    joined = [{event.request: len(event.committed) for event in target.step()} for _ in range(4)]
    assert joined == [{"a": 2, "b": 2, "c": 1}] * 4


def test_without_draft_rows_nobody_is_asked_to_draft() -> None:
    asked: list[int] = []

    def propose(view: SequenceView, budget: int) -> Draft:
        asked.append(budget)
        return NO_DRAFT

    target = engine(max_draft_rows=0)
    target.add(request("a"), drafting(toy_drafters.ToyDrafter(propose)))
    run(target)
    assert not asked


def test_tokens_per_step_of_plain_decoding_is_one() -> None:
    target = engine()
    target.add(request("a", prompt=5, tokens=9), PLAIN)
    metrics = run(target)["a"][-1].metrics
    assert metrics is not None
    assert (metrics.steps, metrics.completion_tokens, metrics.tokens_per_step) == (9, 9, 1.0)
    assert metrics.draft_tokens == metrics.draft_steps == 0


def test_an_early_prefill_chunk_is_no_step_and_its_seconds_are_prefill() -> None:
    target = engine(max_rows=2, max_sequences=2)
    target.add(request("a", prompt=9, tokens=1), PLAIN)
    metrics = run(target)["a"][-1].metrics
    assert metrics is not None
    assert metrics.steps == 1
    assert metrics.seconds == metrics.prefill_seconds > 0


def test_accepted_and_drafted_nodes_are_counted_by_source_and_depth() -> None:
    target = engine()
    target.add(request("a", tokens=10), drafting(toy_drafters.oracle(ANSWER), budget=4))
    events = run(target)["a"]
    metrics = events[-1].metrics
    assert metrics is not None
    assert [len(event.committed) for event in events] == [5, 5]
    assert metrics.accepted_by_source == {"oracle": 8}
    assert metrics.accepted_by_depth == metrics.drafted_by_depth == (2, 2, 2, 2)
    assert [one.source for one in events[0].committed] == ["oracle"] * 4 + ["target"]


def test_running_requests_are_not_delayed_by_a_long_prefill() -> None:
    target = engine(max_rows=8, max_sequences=4)
    target.add(request("short", tokens=20), PLAIN)
    target.step()
    target.add(request("long", prompt=14, tokens=2), PLAIN)
    for _ in range(3):
        assert "short" in {event.request for event in target.step() if event.committed}


def test_urgent_requests_are_admitted_first() -> None:
    target = engine(max_sequences=1)
    for name, priority in (("late", 1), ("urgent", 0), ("later", 1)):
        target.add(request(name, tokens=2, priority=priority), PLAIN)
    order = [event.request for _ in range(12) for event in target.step() if event.finish_reason]
    assert order == ["urgent", "late", "later"]


def test_preemption_loses_no_token_and_the_oldest_is_spared() -> None:
    runner = ToyRunner(LOGITS, VOCAB, capacity=40)
    target = engine(runner)
    wanted = [request(str(index), prompt=3 + index, tokens=24) for index in range(4)]
    for one in wanted:
        target.add(one, PLAIN)
    finished = run(target)
    assert target.scheduler.preemptions > 0
    assert {name: committed(events) for name, events in finished.items()} == {one.id: alone(one) for one in wanted}
    assert next(iter(finished)) == "0"
    assert list(finished["0"][-1].committed)


def test_what_can_never_fit_is_refused_by_both_numbers() -> None:
    target = engine(ToyRunner(LOGITS, VOCAB, capacity=20))
    with pytest.raises(ValueError, match=r"prompt's 4 tokens and max_tokens 18 make 22 tokens, .* holds 21: shorten"):
        target.add(request("big", prompt=4, tokens=18), PLAIN)
    target.add(request("just", prompt=4, tokens=17), PLAIN)  # the last token is never cached
    assert len(committed(run(target)["just"])) == 17
    assert target.longest == 21


def test_nan_logits_end_their_own_request_only() -> None:
    target = engine(ToyRunner(nan_after(LOGITS, 6), VOCAB))
    target.add(request("sick", prompt=3, tokens=10), PLAIN)
    target.add(request("well", prompt=8, tokens=5), PLAIN)
    finished = run(target)
    assert finished["sick"][-1].finish_reason == "error"
    assert "NaN" in (finished["sick"][-1].error or "")
    assert finished["well"][-1].finish_reason == "length"


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_drafter_that_raises_costs_its_requests_nothing(where: str) -> None:
    one = request("a", tokens=12)
    target = engine()
    target.add(one, drafting(toy_drafters.Raising(toy_drafters.oracle(ANSWER), at=1, where=where)))
    events = run(target)["a"]
    assert committed(events) == alone(one)
    assert events[-1].metrics is not None
    assert events[-1].metrics.drafter_faults == 1


@pytest.mark.parametrize("outcomes", [True, False])
def test_a_drafter_is_told_of_each_step_unless_it_does_not_want_to_know(outcomes: bool) -> None:
    told: list[int] = []

    class Told(toy_drafters.ToyDrafter):
        needs = Needs(outcomes=outcomes)

        def observe(self, observations: Sequence[Observation]) -> None:
            told.extend(len(observation.view.tokens) for observation in observations)

    target = engine()
    target.add(request("a", tokens=4), drafting(Told(lambda view, budget: NO_DRAFT)))
    run(target)
    assert told == ([4, 5, 6, 7] if outcomes else [])


@pytest.mark.parametrize(
    "draft",
    [
        Draft(Tree((VOCAB,), (-1,)), sources=("bad",)),
        Draft(Tree((-1,), (-1,)), sources=("bad",)),
        Draft(Tree((1, 2), (-1, 1)), sources=("bad", "bad")),
        Draft(Tree((1, 2), (-1, 0)), sources=("bad",)),
        Draft(Tree((1,), (-1,)), kind="iid", sources=("bad",), probs=torch.ones(1, VOCAB)),
        Draft(Tree((1, 2), (-1, 0)), sources=("bad", "bad"), probes=2, scores=(0.5,)),
    ],
)
def test_a_draft_that_no_forward_or_rule_could_take_is_the_drafters_fault(draft: Draft) -> None:
    one = request("a", tokens=6)
    target = engine()
    target.add(one, drafting(toy_drafters.ToyDrafter(lambda view, budget: draft)))
    events = run(target)["a"]
    assert committed(events) == alone(one)
    assert events[-1].metrics is not None
    assert events[-1].metrics.drafter_faults == 1


def test_drafts_of_many_requests_share_one_row_budget() -> None:
    class Rows(ToyRunner):
        most = 0

        def forward(self, segments, taps=(), skip=NO_SKIP):  # type: ignore[no-untyped-def]
            self.most = max(self.most, sum(len(segment.tree) for segment in segments))
            return super().forward(segments, taps, skip)

    runner = Rows(LOGITS, VOCAB)
    target = engine(runner, max_draft_rows=10)
    for index in range(4):
        target.add(request(str(index), tokens=30), drafting(toy_drafters.oracle(ANSWER), budget=8))
    run(target)
    assert runner.most == 8  # four drafts of two nodes


def test_prompt_logprobs_do_not_depend_on_chunks_or_on_a_reused_prefix() -> None:
    def ask(target: Engine, name: str) -> tuple[object, ...] | None:
        target.add(request(name, prompt=11, tokens=2, params={"prompt_logprobs": 2}), PLAIN)
        return run(target)[name][-1].prompt_logprobs

    whole, chunked = engine(), engine(max_rows=3, max_sequences=3)
    expected = ask(whole, "a")
    assert expected is not None
    assert expected[0] is None
    assert len(expected) == 11
    assert ask(whole, "again") == ask(chunked, "a") == expected


def test_abort_ends_a_request_within_the_step_and_frees_its_sequence() -> None:
    runner = ToyRunner(LOGITS, VOCAB)
    target = engine(runner)
    room = runner.free_tokens()
    target.add(request("a", tokens=30), PLAIN)
    target.step()
    event = target.abort("a")
    assert event is not None
    assert event.finish_reason == "abort"
    assert target.idle
    assert runner.free_tokens() == room
    assert target.abort("a") is None


def test_max_tokens_zero_ends_without_tokens() -> None:
    target = engine()
    target.add(request("a", tokens=0), PLAIN)
    (event,) = run(target)["a"]
    assert (list(event.committed), event.finish_reason) == ([], "length")


def test_context_ends_a_request_by_length() -> None:
    target = engine(max_context=10)
    target.add(request("a", prompt=4, tokens=50), drafting(toy_drafters.oracle(ANSWER), budget=8))
    events = run(target)["a"]
    assert len(committed(events)) == 6
    assert events[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (request("a", prompt=0), "empty"),
        (request("a", prompt=15, tokens=1, params={"logit_bias": {VOCAB: 1.0}}), "logit_bias"),
        (Request(id="a", prompt=(VOCAB,), params=SamplingParams(), key=NoiseKey(0)), "not from 0 to"),
        (Request(id="a", prompt=(1,) * 4096, params=SamplingParams(), key=NoiseKey(0)), "context"),
    ],
)
def test_a_request_that_could_never_run_is_refused_by_name(wrong: Request, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine().add(wrong, PLAIN)


def test_a_request_id_is_unique_while_under_way() -> None:
    target = engine()
    target.add(request("a"), PLAIN)
    with pytest.raises(ValueError, match="is in use"):
        target.add(request("a"), PLAIN)


def test_the_engine_knows_no_text_and_no_library_of_models() -> None:
    """Ids in, ids out: it imports torch and numpy, and of Parlay data, sampling, threads and what steps may cost."""
    names: set[str] = set()
    for path in Path(parlay.engine.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
    parts = {name.split(".")[1] for name in names if name.startswith("parlay.")}
    others = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert (parts, others) == ({"cost", "engine", "sampling", "system", "types"}, {"numpy", "parlay", "torch"})
