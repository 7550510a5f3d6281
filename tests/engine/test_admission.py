"""What the target verifies of what drafters propose: every cut, and that they come in the order that is stated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import pytest

from parlay.engine import Engine, Limits
from parlay.engine.constrained import GRAMMAR
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance.stage import Steady
from parlay.testing.toy_constraint import ToyConstraint, ToyGrammar
from parlay.testing.toys import ToyRunner
from parlay.types import (
    Draft,
    Event,
    NoiseKey,
    Output,
    Request,
    SamplingParams,
    Segment,
    SequenceView,
    Strategy,
    Tree,
    trees,
)
from tests.engine.toy_engine import LOGITS, VOCAB

GRAMMAR_40 = ToyGrammar(VOCAB, length=40, seed=7)
TREE = Draft(Tree((1, 2, 3, 4, 5), (-1, -1, 1, 2, 2)), sources=("me",) * 5, scores=(0.1, 0.9, 0.9, 0.9, 0.1))
"""Its best chain is 2, 3, 4."""


class Watched(ToyRunner):
    """Notes the drafts that it verifies."""

    def __init__(self, *, capacity: int = 4096, tree: Literal["tree", "chain", "none"] = "tree") -> None:
        super().__init__(LOGITS, VOCAB, capacity=capacity)
        self.spec = replace(self.spec, tree=tree)
        self.drafts: list[Tree] = []

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Output:
        self.drafts += [segment.tree for segment in segments if segment.tree.tokens]
        return super().forward(segments, taps)


class Cutting(Fixed):
    """Keeps the first ``keep`` nodes, and notes what it was shown."""

    def __init__(self, budget: int, keep: int) -> None:
        super().__init__(budget)
        self.keep = keep
        self.shown: list[Draft] = []

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        self.shown += drafts
        return [trees.first(draft, self.keep) for draft in drafts]


def ask(name: str = "a", *, constraint: ToyConstraint | None = None, tokens: int = 12) -> Request:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return Request(id=name, prompt=(1, 2, 3), params=params, key=NoiseKey(0), constraint=constraint)


def proposing(guess: Callable[[SequenceView, int], Draft], policy: Fixed) -> Strategy:
    return Strategy("s", (toy_drafters.ToyDrafter(guess),), SharedNoise(), policy)


def steps(runner: ToyRunner, asks: Sequence[Request], strategy: Strategy, count: int, **limits: int) -> list[Event]:
    engine = Engine(runner, Steady(), Limits(**limits))
    for one in asks:
        engine.add(one, strategy)
    return [event for _ in range(count) for event in engine.step()]


def first_draft(strategy: Strategy, runner: Watched, **limits: int) -> Tree:
    steps(runner, [ask()], strategy, 1, **limits)
    return runner.drafts[0]


def test_a_draft_keeps_to_its_budget_and_its_probes_come_on_top() -> None:
    probing = replace(TREE, tree=Tree((*TREE.tree.tokens, 7), (*TREE.tree.parents, -1)), sources=("me",) * 6)
    probing = replace(probing, scores=(), probes=1)
    seen = first_draft(proposing(lambda view, budget: probing, Fixed(2)), Watched())
    assert seen == Tree((1, 2, 7), (-1, -1, -1))


def test_nothing_is_verified_below_a_token_that_ends_the_text() -> None:
    """Neither nodes nor probes: their rows would be computed for nobody."""
    probed = Draft(Tree((1, 2, 3, 7, 7), (-1, 0, 1, 1, 0)), sources=("me",) * 5, probes=2)
    for stops, seen in (
        (frozenset[int](), probed.tree),
        (frozenset({9}), probed.tree),
        (frozenset({2}), Tree((1, 2, 7), (-1, 0, 0))),
        (frozenset({7}), probed.tree),  # what a probe reads ends no text
    ):
        runner = Watched()
        steps(runner, [replace(ask(), stop_ids=stops)], proposing(lambda view, budget: probed, Fixed(3)), 1)
        assert runner.drafts == [seen]


def test_the_policy_sees_what_the_budget_and_the_runner_leave() -> None:
    policy = Cutting(budget=4, keep=2)
    seen = first_draft(proposing(lambda view, budget: TREE, policy), Watched(tree="chain"))
    assert [draft.tree for draft in policy.shown] == [trees.chain_tree([2, 3, 4])]
    assert seen == trees.chain_tree([2, 3])


def test_the_policy_sees_allowed_nodes_only_and_forced_tokens_come_after_it() -> None:
    """A policy that cuts everything takes nothing from the tokens that have no alternative."""
    policy = Cutting(budget=2, keep=0)
    constraint = ToyConstraint(GRAMMAR_40)
    runner = Watched()

    def guess(view: SequenceView, budget: int) -> Draft:
        output = view.tokens[view.prompt_length :]
        bad = next(token for token in range(VOCAB) if token not in GRAMMAR_40.following(output))
        return Draft(Tree((bad, GRAMMAR_40.following(output)[0]), (-1, -1)), sources=("me", "me"))

    events = steps(runner, [ask(constraint=constraint, tokens=30)], proposing(guess, policy), 30)
    assert {len(draft) for draft in policy.shown} == {1}, "the forbidden sibling is gone"
    sources = [one.source for event in events for one in event.committed]
    assert set(sources) == {GRAMMAR, "target"}
    assert runner.drafts


def test_memory_is_asked_for_what_the_shared_rows_leave_of_a_draft() -> None:
    """Two drafts that the cache could not hold whole are both verified, because their shares of the rows fit."""
    runner = Watched(capacity=22)
    long = trees.chain([1] * 12, "me")
    asks = [ask(name, tokens=14) for name in "ab"]
    steps(runner, asks, proposing(lambda view, budget: long, Fixed(12)), 1, max_draft_rows=12)
    assert runner.drafts == [trees.chain_tree([1] * 6)] * 2


class Torn(ToyConstraint):
    """Can't tell what must come next."""

    def forced(self, limit: int) -> tuple[int, ...]:
        raise RuntimeError("bad grammar")


def test_a_constraint_that_raises_costs_its_request_the_drafts_and_nothing_else() -> None:
    oracle = toy_drafters.oracle(toy_drafters.answer_by(LOGITS))
    strategy = Strategy("s", (oracle,), SharedNoise(), Fixed(3))
    plain = steps(ToyRunner(LOGITS, VOCAB), [ask("a", constraint=ToyConstraint(GRAMMAR_40)), ask("b")], strategy, 20)
    torn = steps(ToyRunner(LOGITS, VOCAB), [ask("a", constraint=Torn(GRAMMAR_40)), ask("b")], strategy, 20)
    for name, faults in (("a", 1), ("b", 0)):
        mine = [event for event in torn if event.request == name]
        expected = [one.token for event in plain if event.request == name for one in event.committed]
        assert [one.token for event in mine for one in event.committed] == expected
        assert mine[-1].metrics is not None
        assert mine[-1].metrics.drafter_faults == faults


@pytest.mark.parametrize("rows", [1, 5, 7, 100])
def test_drafts_of_a_step_share_the_rows_evenly(rows: int) -> None:
    runner = Watched()
    chains = {name: trees.chain([1] * count, "me") for name, count in (("a", 4), ("b", 1), ("c", 3))}
    strategy = proposing(lambda view, budget: chains[view.request.id], Fixed(4))
    steps(runner, [ask(name) for name in chains], strategy, 1, max_draft_rows=rows)
    expected = {1: [1], 5: [2, 1, 2], 7: [3, 1, 3], 100: [4, 1, 3]}[rows]
    if rows > 3:
        assert [len(tree) for tree in runner.drafts] == expected
    assert sum(len(tree) for tree in runner.drafts) <= rows
