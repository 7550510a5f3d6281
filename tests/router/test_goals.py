"""Goals of a router: each is reached better by the router that has it than by the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.router.goals import GOALS, Aim
from parlay.types import NO_DRAFT, Draft
from tests.router.simulated_arms import Machine, SimulatedArm
from tests.router.views import SequenceView

COPY = SimulatedArm(rate=lambda length: 0.9, replayable=True, most=31, score=0.9)
HEAD = SimulatedArm(rate=lambda length: 0.9, step_seconds=0.1, node_seconds=0.01, most=8)


class OneDrafts(Machine):
    """Nothing is found for any sequence but the first."""

    def _draft(self, arm: SimulatedArm, number: int, view: SequenceView, nodes: int) -> Draft:
        return NO_DRAFT if view.sequence else super()._draft(arm, number, view, nodes)


def decoded(goal: str, sequences: int, arm: SimulatedArm = COPY) -> tuple[float, float]:
    """Tokens per second of all sequences, and seconds per token in their mean."""
    machine = OneDrafts((arm,), aim=Aim(goal=GOALS[goal]))
    views = [SequenceView(number) for number in range(sequences)]
    for _ in range(300):
        machine.step(views)
    run = machine.run
    return run.speed, fmean(run.seconds / (len(view.tokens) - 1) for view in views)


def test_each_goal_is_reached_best_by_who_has_it() -> None:
    """One of sixteen sequences could copy, and every row makes the step longer for all."""
    fast, slow_mean = decoded("throughput", 16)
    slow, quick_mean = decoded("latency", 16)
    assert fast > 1.05 * slow
    assert quick_mean < 0.95 * slow_mean


@pytest.mark.parametrize("arm", [COPY, replace(COPY, rate=lambda length: 0.0), HEAD])
def test_latency_is_no_worse_than_that_of_plain_decoding(arm: SimulatedArm) -> None:
    plain = 1.6
    assert decoded("latency", 16, arm)[1] < 1.02 * plain


@pytest.mark.parametrize("arm", [COPY, HEAD])
def test_for_one_sequence_the_goals_are_the_same(arm: SimulatedArm) -> None:
    assert decoded("latency", 1, arm)[0] == pytest.approx(decoded("throughput", 1, arm)[0], rel=0.03)


@pytest.mark.parametrize("goal", GOALS)
@given(path_probs=st.lists(st.floats(0.01, 1.0), max_size=8).map(lambda probs: sorted(probs, reverse=True)))
def test_the_shares_of_a_drafts_nodes_are_its_worth_and_likelier_ones_have_more(
    goal: str, path_probs: list[float]
) -> None:
    chosen = GOALS[goal]
    shares = chosen.shares(path_probs)
    assert shares == sorted(shares, reverse=True)
    gains = [0.0, *accumulate(path_probs)]
    for count, gain in enumerate(gains):
        assert sum(shares[:count]) == pytest.approx(chosen.worth(gain))
