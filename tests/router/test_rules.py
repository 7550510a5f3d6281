"""The policies that follow a rule from a paper, by exact traces and worked examples."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from parlay.router.policies import BY_NAME, Confidence, Heuristic, Risk, best_threshold, make_policy
from parlay.types import NO_DRAFT, NOTHING_NEEDED, Draft, Policy, Spent, Tree, trees
from tests.router.views import SequenceView


class Flat:
    revision = 0

    def forward(self, rows: int, context: int) -> float:
        return 1.0

    def record(self, rows: int, context: int, seconds: float) -> None:
        raise AssertionError("the engine records, not the policy")


def outcome(policy: Policy, view: SequenceView, draft: Draft, accepted: Sequence[int]) -> None:
    """A step whose walk took the nodes ``accepted``."""
    view.tokens += [*(draft.tree.tokens[node] for node in accepted), -1]
    policy.learn([view], [draft], [len(accepted)], Spent(0.0, 1.0, 1 + len(draft), len(view.tokens)))


def chain(length: int, scores: Sequence[float] = ()) -> Draft:
    return trees.chain(list(range(10, 10 + length)), "toy", scores)


def step(policy: Policy, view: SequenceView, right: bool) -> int:
    budget = policy.plan([view]).nodes[0]
    outcome(policy, view, chain(budget), range(budget if right else budget - 1))
    return budget


def test_every_name_that_a_strategy_may_ask_for_is_a_policy() -> None:
    view = SequenceView(0)
    for name in BY_NAME:
        policy = make_policy(name, 0, Flat(), NOTHING_NEEDED)
        assert policy.plan([view]).nodes == [0]
        assert policy.trim([view], [NO_DRAFT]) == [NO_DRAFT]
        policy.learn([view], [NO_DRAFT], [0], Spent(0.0, 1.0, 1, 1))
        assert policy.plan([view]).nodes == [0]
        policy.release(0)
        policy.release(0)


def test_heuristic_gives_the_budget_trace_of_the_reference() -> None:
    """+2 after a draft that held to its end, -1 after any other."""
    policy, view = Heuristic(20), SequenceView(0)
    right = [True, True, False, False, True, True, False]
    assert [step(policy, view, each) for each in right] == [20, 22, 24, 23, 22, 24, 26]


def test_heuristic_never_falls_below_one_node() -> None:
    policy, view = Heuristic(3), SequenceView(0)
    assert [step(policy, view, False) for _ in range(5)] == [3, 2, 1, 1, 1]


def test_heuristic_counts_what_was_verified_not_what_was_planned() -> None:
    """A short draft that holds is a draft that holds; a tree holds when its deepest path does; nothing says nothing."""
    policy, view = Heuristic(6), SequenceView(0)
    outcome(policy, view, chain(2), range(2))
    assert policy.plan([view]).nodes == [8]
    tree = Draft(Tree((5, 6, 7), (-1, -1, 1)), sources=("toy",) * 3)
    outcome(policy, view, tree, [1, 2])
    assert policy.plan([view]).nodes == [10]
    outcome(policy, view, tree, [0])
    outcome(policy, view, NO_DRAFT, [])
    outcome(policy, view, Draft(Tree((5,), (-1,)), sources=("toy",), probes=1), [])
    assert policy.plan([view]).nodes == [9]


@pytest.mark.parametrize(("name", "second"), [("heuristic", 9), ("heuristic-transient", 5)])
def test_the_heuristic_persists_over_requests_and_its_transient_form_does_not(name: str, second: int) -> None:
    policy = make_policy(name, 5, Flat(), NOTHING_NEEDED)
    view = SequenceView(0)
    step(policy, view, True)
    step(policy, view, True)
    assert policy.plan([SequenceView(1)]).nodes == [5], "requests side by side do not mix"
    policy.release(0)
    assert policy.plan([SequenceView(2)]).nodes == [second]


def test_confidence_ends_a_path_with_its_first_unsure_node() -> None:
    """The node below the threshold is the last one drafted, as in the reference; siblings go on."""
    policy, view = Confidence(20), SequenceView(0)
    assert policy.plan([view]).nodes == [20]
    kept = policy.trim([view], [chain(4, [0.9, 0.4, 0.39, 0.99])])[0]
    assert kept.scores == (0.9, 0.4, 0.39)
    tree = Draft(Tree((1, 2, 3, 4), (-1, -1, 0, 1)), sources=("toy",) * 4, scores=(0.2, 0.8, 0.9, 0.9))
    assert policy.trim([view], [tree])[0].tree == Tree((1, 2, 4), (-1, -1, 1))


def test_confidence_leaves_what_has_no_scores_or_was_drawn() -> None:
    policy, view = Confidence(20), SequenceView(0)
    drawn = Draft(Tree((1, 2), (-1, 0)), kind="iid", sources=("toy",) * 2, scores=(0.1, 0.1))
    probing = Draft(Tree((1, 2, 3), (-1, 0, -1)), sources=("toy",) * 3, scores=(0.1, 0.9, 0.9), probes=1)
    plain = chain(3)
    assert policy.trim([view], [drawn])[0] is drawn
    assert policy.trim([view], [plain])[0] == plain
    cut = policy.trim([view], [probing])[0]
    assert (cut.tree.tokens, cut.probes) == ((1, 3), 1)


def test_threshold_of_a_worked_example() -> None:
    """Right: .9 .6 .3, wrong: .8 .5 .2. From .3 on: FPR 2/3, FNR 0; from .6 on: FPR 1/3, FNR 1/3, so 1/3 + 3/3."""
    record = [(0.9, True), (0.8, False), (0.6, True), (0.5, False), (0.3, True), (0.2, False)]
    assert best_threshold(record, 0.4) == 0.3
    assert best_threshold([(0.9, True), (0.8, True), (0.1, False)], 0.4) == 0.8
    assert best_threshold([(0.5, True), (0.5, False), (0.1, False)], 0.4) == 0.5
    assert best_threshold([(0.9, True)] * 6, 0.4) == 0.4
    assert best_threshold([(0.9, False)] * 6, 0.4) == 0.4


def test_threshold_is_the_least_cost_over_all_scores() -> None:
    """Against the definition, by trying every score."""
    chance = random.Random(0)
    for _ in range(50):
        record = [(round(chance.random(), 1), chance.random() < 0.5) for _ in range(12)]
        right = [score for score, accepted in record if accepted]
        wrong = [score for score, accepted in record if not accepted]
        if right and wrong:
            costs = {
                at: sum(s >= at for s in wrong) / len(wrong) + 3 * sum(s < at for s in right) / len(right)
                for at, _ in record
            }
            assert costs[best_threshold(record, 0.4)] == pytest.approx(min(costs.values()))


def test_only_verified_nodes_are_evidence_for_the_threshold() -> None:
    """What lies behind the first rejection was never tested: its scores would drag the threshold."""
    policy, view = Confidence(20), SequenceView(0)
    for _ in range(3):
        outcome(policy, view, chain(5, [0.9, 0.7, 0.1, 0.1, 0.1]), [0])
    assert policy.threshold == 0.9  # six tested nodes: three right ones of .9, three wrong ones of .7
    for _ in range(3):
        outcome(policy, view, chain(2, [0.2, 0.1]), [0])
    assert policy.threshold == 0.2


def test_the_threshold_waits_for_evidence_of_both_kinds() -> None:
    policy, view = Confidence(20), SequenceView(0)
    for _ in range(10):
        outcome(policy, view, chain(2, [0.9, 0.8]), [0, 1])
    assert policy.threshold == 0.4


def test_risk_bounds() -> None:
    """1 ends no draft; 0 ends every one after two levels, the first of which counts as certain."""
    view = SequenceView(0)
    draft = chain(20, [0.5] * 20)
    assert len(Risk(20, most=1.0).trim([view], [draft])[0]) == 20
    assert len(Risk(20, most=0.0).trim([view], [draft])[0]) == 2


def test_risk_ends_a_path_where_a_rejection_in_it_has_become_likely() -> None:
    """1 - .9 = .1 and 1 - .81 = .19 go on, 1 - .729 = .27 goes on, 1 - .656 = .34 does not."""
    draft = chain(8, [0.5] + [0.9] * 7)
    assert len(Risk(20, most=0.3).trim([SequenceView(0)], [draft])[0]) == 5
    tree = Draft(Tree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 2)), sources=("toy",) * 5, scores=(0.9, 0.9, 0.1, 0.9, 0.9))
    assert Risk(20).trim([SequenceView(0)], [tree])[0].tree == Tree((1, 2, 3, 4), (-1, 0, 0, 1))


def test_risk_puts_scores_right() -> None:
    """A drafter that claims .95 and is right once in two gets short drafts; one that claims .6 and never errs, long."""
    boastful, modest = Risk(20), Risk(20)
    view = SequenceView(0)
    assert len(boastful.trim([view], [chain(20, [0.95] * 20)])[0]) == 8
    for turn in range(200):
        outcome(boastful, view, chain(2, [0.95] * 2), [0] if turn % 2 else [])
        outcome(modest, view, chain(2, [0.6] * 2), [0, 1])
    assert len(boastful.trim([view], [chain(20, [0.95] * 20)])[0]) == 2
    assert len(modest.trim([view], [chain(20, [0.6] * 20)])[0]) > 8


def test_risk_keeps_drawn_drafts_and_probes() -> None:
    policy, view = Risk(20, most=0.0), SequenceView(0)
    drawn = Draft(Tree((1, 2, 3), (-1, 0, 1)), kind="iid", sources=("toy",) * 3)
    probing = Draft(Tree((1, 2, 3, 4), (-1, 0, 1, -1)), sources=("toy",) * 4, scores=(0.5,) * 4, probes=1)
    assert policy.trim([view], [drawn])[0] is drawn
    cut = policy.trim([view], [probing])[0]
    assert (cut.tree.tokens, cut.probes) == ((1, 2, 4), 1)


@pytest.mark.parametrize("policy", [Confidence(20, 0.0), Risk(20, most=1.0)])
def test_a_draft_that_ends_the_text_counts_as_right_to_its_end(policy: Confidence | Risk) -> None:
    """No token of the target's own follows a stop token that was drafted."""
    view, draft = SequenceView(0), chain(3, (0.9,) * 3)
    for _ in range(8):
        policy.trim([view], [draft])
        view.tokens += draft.tree.tokens
        policy.learn([view], [draft], [3], Spent(0.0, 1.0, 4, len(view.tokens)))
    if isinstance(policy, Confidence):
        assert [right for _, right in policy._record] == [True] * 24
    else:
        assert policy._calibration.chance(0.9) > 0.95
