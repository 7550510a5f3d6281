"""Cascades: a level writes what its model would write alone, in fewer of its forwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from parlay.drafters.combined.cascade import Cascade
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.conformance import subject_of, toy_stage
from parlay.testing.conformance.stage import StageRequest, decode
from parlay.types import (
    NO_DRAFT,
    Draft,
    Needs,
    Observation,
    Request,
    SamplingParams,
    SequenceView,
    Tree,
    Verdict,
    trees,
)
from tests.drafters.sight import GREEDY, SAMPLED, MakeRunner, Sight, propose

VOCAB = 12
EDITED = replace(GREEDY, params=SamplingParams(temperature=0.9, repetition_penalty=1.4, top_k=6))


class Scripted:
    """Proposes what ``write`` says, and remembers what it was asked and told."""

    needs = Needs(taps=(2,), top_k=3)

    def __init__(self, resources: Resources) -> None:
        Scripted.last = self
        self.write: Callable[[SequenceView, int], Draft] = lambda view, budget: NO_DRAFT
        self.asked: list[tuple[list[int], int]] = []
        self.calls = 0
        self.seen: list[Observation] = []
        self.released: list[int] = []

    last: Scripted

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self.calls += 1
        self.asked += [(list(view.tokens), budget) for view, budget in zip(views, budgets, strict=True)]
        return [self.write(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        self.seen += observations

    def release(self, sequence: int) -> None:
        self.released.append(sequence)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "toy_levels", sys.modules[__name__])


def resources(runners: Any) -> Resources:
    """``runners``: one for every name, or one per name."""
    shelf = runners if isinstance(runners, dict) else None
    return Resources(VOCAB, (lambda name: shelf[name]) if shelf else lambda name: runners, default_draft="toy")


def made(text: str, runners: Any) -> Any:
    return build(parse(text), resources(runners))


def scripted(runner: Any, level: str = "min_p=0") -> tuple[Cascade, Scripted]:
    cascade = made(f"cascade:levels=toy_levels:Scripted(k=100)+draft-model(k=100,{level})", runner)
    assert isinstance(cascade, Cascade)
    return cascade, Scripted.last


def right(runner: Any, count: int) -> Callable[[SequenceView, int], Draft]:
    """The first ``count`` tokens the greedy model writes, then one it does not."""

    def write(view: SequenceView, budget: int) -> Draft:
        tokens = runner.continuation(view.tokens, count + 1)
        tokens[count] = (tokens[count] + 1) % VOCAB
        return trees.chain(tokens[:budget], "script")

    return write


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED, EDITED], ids=["greedy", "sampled", "edited"])
@pytest.mark.parametrize("min_p", [0, 0.01])
def test_what_is_handed_up_is_the_models_own_draft_whatever_the_level_below_says(
    toy_runner: MakeRunner, request_: Request, min_p: float
) -> None:
    """Fixed guesses through the inner stage: the nodes and scores of the model alone, in at most as many forwards."""
    alone_runner, silent_runner, runner = toy_runner(), toy_runner(), toy_runner()
    alone = made(f"draft-model:min_p={min_p}", alone_runner)
    silent = made(f"cascade:levels=prompt-lookup(k=0)+draft-model(k=16,min_p={min_p})", silent_runner)
    cascade = made(f"cascade:levels=prompt-lookup(min_ngram=1)+draft-model(k=16,min_p={min_p})", runner)
    view = Sight(request=request_, tokens=[1, 2, 3, 4, 1, 2, 3])
    for step in range(6):
        expected = propose(alone, view, 7)
        for drafter in (silent, cascade):
            draft = propose(drafter, view, 7)
            assert draft.tree == expected.tree
            assert draft.kind == "point"
            assert draft.scores == pytest.approx(expected.scores)
        view.tokens += [*expected.tree.tokens[:step], step]
    assert len(silent_runner.calls) == len(alone_runner.calls)
    assert len(runner.calls) <= len(alone_runner.calls)


def test_a_level_that_is_often_right_saves_forwards_and_without_it_there_are_more(toy_runner: MakeRunner) -> None:
    """Staged decoding: with the inner stage off the draft is the same, with more calls of the model."""
    runner = toy_runner()
    cascade, script = scripted(runner)
    script.write = right(runner, 3)
    draft = propose(cascade, Sight(), 8)
    assert list(draft.tree.tokens) == runner.continuation([1, 2, 3], 8)
    assert len(runner.calls) == 2  # 3 and one more, twice
    runner.calls.clear()
    script.write = lambda view, budget: NO_DRAFT
    assert propose(cascade, Sight(1), 8).tree == draft.tree
    assert len(runner.calls) == 8


def test_tokens_are_credited_to_the_level_that_wrote_them_first(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    cascade, script = scripted(runner)
    script.write = right(runner, 2)
    draft = propose(cascade, Sight(), 8)
    assert draft.sources == ("script", "script", "draft-model") * 2 + ("script", "draft-model")


def test_levels_of_one_name_are_told_apart(toy_runner: MakeRunner) -> None:
    small, big = toy_runner(), toy_runner()
    cascade = made(
        "cascade:levels=draft-model(k=3,min_p=0,model=small)+draft-model(min_p=0,model=big)",
        {"small": small, "big": big},
    )
    draft = propose(cascade, Sight(), 8)
    assert set(draft.sources) == {"draft-model", "draft-model(min_p=0.0,model=big)"}
    assert len(big.calls) == 2


def test_the_level_below_sees_what_is_written_so_far_and_is_not_asked_for_waste(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    cascade, script = scripted(runner)
    script.write = right(runner, 1)
    propose(cascade, Sight(), 5)
    text = [1, 2, 3, *runner.continuation([1, 2, 3], 5)]
    assert script.asked == [(text[:3], 4), (text[:5], 2)]  # the last token needs no draft


def test_trees_of_the_level_below_are_walked_in_one_forward(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    cascade, script = scripted(runner)

    def bush(view: SequenceView, budget: int) -> Draft:
        first, second = runner.continuation(view.tokens, 2)
        wrong = (first + 1) % VOCAB
        return trees.first(Draft(Tree((wrong, first, second), (-1, -1, 1)), sources=("bush",) * 3), budget)

    script.write = bush
    draft = propose(cascade, Sight(), 7)
    assert list(draft.tree.tokens) == runner.continuation([1, 2, 3], 7)
    assert len(runner.calls) == 3  # 2 and one more, twice, and the last alone
    chains = toy_runner(trees=False)
    cascade, script = scripted(chains)
    script.write = bush
    assert propose(cascade, Sight(), 7).tree == draft.tree
    assert all(trees.is_chain(segment.tree) for call in chains.calls for segment in call)


def test_a_level_may_hand_up_a_tree(toy_runner: MakeRunner) -> None:
    """The drawn token and the next best at each place, likeliest paths first; the drawn ones are the chain."""
    runner = toy_runner()
    cascade, script = scripted(runner, "min_p=0,shape=tree,width=2")
    script.write = right(runner, 3)
    draft = propose(cascade, Sight(), 6)
    assert len(draft) == 6
    assert not trees.is_chain(draft.tree)
    reach: list[float] = []
    for node, parent in enumerate(draft.tree.parents):
        prefix = [1, 2, 3, *(draft.tree.tokens[above] for above in trees.path_to(draft.tree, parent))]
        probabilities = runner.logits(prefix).softmax(-1)
        assert draft.tree.tokens[node] in probabilities.topk(2).indices.tolist()
        assert draft.scores[node] == pytest.approx(float(probabilities[draft.tree.tokens[node]]), rel=1e-5)
        reach.append(draft.scores[node] * (reach[parent] if parent >= 0 else 1))
    assert all(reach[parent] >= reach[node] for node, parent in enumerate(draft.tree.parents) if parent >= 0)
    assert draft.tree.tokens[0] == runner.continuation([1, 2, 3], 1)[0]


@pytest.mark.parametrize("level", ["min_p=0", "min_p=0.02", "min_p=0,shape=tree,width=2"])
def test_whatever_was_committed_the_next_draft_is_that_of_a_fresh_cascade(toy_runner: MakeRunner, level: str) -> None:
    """State is a cache keyed by the tokens: acceptance of all, some, none, skipped steps, rewinds, other texts."""
    text = f"cascade:levels=prompt-lookup(k=4)+draft-model(k=16,model=a,min_p=0)+draft-model(k=16,model=b,{level})"
    drafter = made(text, {"a": toy_runner(), "b": toy_runner()})
    view = Sight(tokens=[1, 2, 3, 1, 2])
    for commit in ("all", "none", "some", "all", "all", "skip", "rewind", "replace", "some", "all"):
        draft = propose(drafter, view, 6)
        fresh = made(text, {"a": toy_runner(), "b": toy_runner()})
        assert draft == propose(fresh, replace(view, tokens=list(view.tokens)), 6)
        path = [draft.tree.tokens[node] for node in trees.leaf_paths(draft.tree)[0]] if len(draft) else []
        changes = {"all": [*path, 11], "some": [*path[:2], 11], "none": [10], "skip": [5, 6, 7, 8]}
        if commit in changes:
            view.tokens += changes[commit]
        elif commit == "rewind":
            del view.tokens[-3:]
        else:
            view.tokens[:] = [9, 8, 7, 9, 8]


def test_sequences_of_a_level_run_together_and_do_not_disturb_each_other(toy_runner: MakeRunner) -> None:
    """Ragged: other lengths, budgets and acceptance; as many forwards as the slowest needs, each text as alone."""
    runner = toy_runner()
    cascade, script = scripted(runner)
    script.write = lambda view, budget: right(runner, len(view.tokens) % 3)(view, budget)
    views = [Sight(number, [1, 2, 3, *range(number)]) for number in range(5)]
    drafts = cascade.propose(views, [8, 1, 0, 5, 3])
    for view, budget, draft in zip(views, [8, 1, 0, 5, 3], drafts, strict=True):
        assert list(draft.tree.tokens) == runner.continuation(view.tokens, budget)
    assert len(runner.calls) <= 8
    assert script.calls == len(runner.calls) - 1  # the last forward wants one token each
    assert len(runner.calls[0]) == 4


def test_enough_stops_after_the_forward_that_reached_it_and_keeps_what_was_verified(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    cascade = made("cascade:enough=2,levels=toy_levels:Scripted+draft-model(k=16,min_p=0)", runner)
    Scripted.last.write = right(runner, 4)
    assert len(propose(cascade, Sight(), 9)) == 5
    Scripted.last.write = lambda view, budget: NO_DRAFT
    assert len(propose(cascade, Sight(1), 9)) == 2


def test_no_level_drafts_more_than_its_own_k(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    cascade = made("cascade:levels=toy_levels:Scripted(k=3)+draft-model(k=5,min_p=0)", runner)
    Scripted.last.write = right(runner, 9)
    assert len(propose(cascade, Sight(), 9)) == 5
    assert [budget for _, budget in Scripted.last.asked] == [3]


def test_the_first_level_is_told_what_became_of_the_draft_and_what_it_needs(toy_runner: MakeRunner) -> None:
    cascade, script = scripted(toy_runner())
    assert cascade.needs == Needs(taps=(2,), top_k=3)
    seen = Observation(
        Sight(), NO_DRAFT, Verdict((), (5,)), {2: torch.ones(1, 2), 3: torch.ones(1, 2)}, ((5, 4, 3, 2),)
    )
    cascade.observe([seen])
    assert sorted(script.seen[0].taps) == [2]
    assert script.seen[0].top_k == ((5, 4, 3),)
    cascade.release(0)
    cascade.release(99)
    assert script.released == [0, 99]


def test_where_the_model_has_no_room_or_no_context_left_nothing_is_drafted(toy_runner: MakeRunner) -> None:
    cascade, _ = scripted(toy_runner(capacity=6))
    assert propose(cascade, Sight(), 8) == NO_DRAFT
    cascade, _ = scripted(toy_runner(max_context=5))
    assert len(propose(cascade, Sight(), 8)) == 2
    assert propose(cascade, Sight(1, [1, 2, 3, 4, 5]), 8) == NO_DRAFT
    assert cascade.propose([], []) == []


def test_logits_that_are_nan_end_the_draft(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    cascade, script = scripted(runner)
    expected = runner.continuation([1, 2, 3], 2)
    logits = runner.logits
    runner.logits = lambda prefix: logits(prefix) * (float("nan") if len(prefix) >= 5 else 1)
    script.write = lambda view, budget: trees.chain(expected[: min(1, budget)], "script")
    assert list(propose(cascade, Sight(), 6).tree.tokens) == expected


def test_a_draft_that_was_drawn_is_refused_and_probes_are_left_out(toy_runner: MakeRunner) -> None:
    cascade, script = scripted(toy_runner())
    script.write = lambda view, budget: replace(trees.chain([1], "script"), kind="iid")
    with pytest.raises(ValueError, match="kind 'iid'"):
        propose(cascade, Sight(), 4)
    runner = toy_runner()
    cascade, script = scripted(runner)
    script.write = lambda view, budget: replace(trees.chain([1, 2], "script"), probes=2)
    assert list(propose(cascade, Sight(), 4).tree.tokens) == runner.continuation([1, 2, 3], 4)
    assert len(runner.calls) == 4
    assert not any(len(segment.tree) for call in runner.calls for segment in call)


def test_a_level_that_raised_once_leaves_the_others_sound(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    cascade, script = scripted(runner)

    def broken(view: SequenceView, budget: int) -> Draft:
        if len(view.tokens) > 4:
            raise RuntimeError("broken")
        return NO_DRAFT

    script.write = broken
    with pytest.raises(RuntimeError, match="broken"):
        propose(cascade, Sight(), 6)
    script.write = lambda view, budget: NO_DRAFT
    assert list(propose(cascade, Sight(), 6).tree.tokens) == runner.continuation([1, 2, 3], 6)


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ("", ["two or more"]),
        ("draft-model", ["two or more"]),
        ("draft-model+draft-model", ["two or more different"]),
        ("none+draft-model", ["none drafts nothing"]),
        ("draft-model+prompt-lookup", ["prompt-lookup can only be the first", "draft-model"]),
        ("prompt-lookup+none", ["none can only be the first"]),
        ("toy_levels:Scripted+toy_levels:Scripted(k=2)", ["can only be the first"]),
        ("prompt-lookup+draft-model(model=chainless)", ["chainless", "can't verify"]),
        ("prompt-lookup+draft-model(model=other)", ["vocabulary of 5"]),
    ],
)
def test_levels_that_can_not_work_are_refused_when_built(
    toy_runner: MakeRunner, levels: str, words: Sequence[str]
) -> None:
    chainless = toy_runner()
    chainless.spec = replace(chainless.spec, tree="none")
    runners = {"toy": toy_runner(), "chainless": chainless, "other": toy_runner(vocab=5)}
    with pytest.raises(UsageError) as caught:
        made(f"cascade:levels={levels}", runners)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_model_is_said_when_built() -> None:
    nothing = Resources(VOCAB, lambda name: pytest.fail(f"{name} was opened"))
    with pytest.raises(UsageError, match=r"draft-model\(model=...\)"):
        build(parse("cascade"), nothing)


def test_no_two_ways_to_join_two_drafters_propose_the_same(toy_runner: MakeRunner) -> None:
    """A copy that is right for three tokens: who is asked first, who verifies whom, who goes on."""

    def short_sighted() -> Any:
        runner = toy_runner()
        logits = runner.logits
        runner.logits = lambda prefix: logits(prefix[-2:])
        return runner

    own = short_sighted().continuation([1, 2], 4)
    tokens = [1, 2, *own[:3], (own[3] + 1) % VOCAB, 1, 2]
    ways = {
        "alone": "draft-model:min_p=0",
        "union": "union:of=prompt-lookup+draft-model(min_p=0)",
        "cascade": "cascade:levels=prompt-lookup+draft-model(k=16,min_p=0)",
        "horizontal": "horizontal:levels=draft-model(k=2,min_p=0)+prompt-lookup",
        "cs-drafting": "cs-drafting:drafters=draft-model(min_p=0)+prompt-lookup,matrix=2/5+0/4",
    }
    drafts = {name: propose(made(text, short_sighted()), Sight(0, tokens), 6) for name, text in ways.items()}
    assert drafts["cascade"].tree == drafts["alone"].tree  # but fewer forwards, and other sources
    proposals = {(draft.tree, draft.sources) for draft in drafts.values()}
    assert len(proposals) == len(ways)


def test_a_level_that_fails_during_a_run_costs_its_request_the_drafts_and_no_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine isolates it: the broken request goes on plainly, the one beside it keeps drafting."""
    stage = toy_stage("toy", 12)
    subject = subject_of("cascade:levels=toy_levels:Scripted+draft-model(k=16,min_p=0)")
    strategy = subject.strategy(stage, 6)

    def broken(view: SequenceView, budget: int) -> Draft:
        if view.request.prompt[0] == 1 and len(view.tokens) > 30:
            raise RuntimeError("broken")
        return trees.chain([2, 3][:budget], "script")

    Scripted.last.write = broken
    asks = [StageRequest((first, 5, 6), SamplingParams(max_tokens=60), seed=first) for first in (1, 2)]
    samples = decode(stage.open_runner(4096), [(ask, strategy) for ask in asks])
    for ask, sample in zip(asks, samples, strict=True):
        assert sample.tokens == stage.expected(ask).output
    assert [sample.metrics.drafter_faults for sample in samples] == [1, 0]
    assert samples[0].metrics.accepted_tokens > 0
    assert samples[1].metrics.steps < samples[0].metrics.steps
    assert re.search(r"failed at line \d+ of test_cascade.py \(RuntimeError: broken\)", caplog.text)
