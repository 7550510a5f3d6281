"""The effort of a router: how much it tries, and how surely a draft must pay."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from parlay.router.goals import EFFORTS, Aim
from tests.router.simulated_arms import Machine, Run, SimulatedArm

TOKENS = 1200
HEAD = SimulatedArm(rate=lambda length: 0.85, step_seconds=0.3, node_seconds=0.05, most=8)
NEARLY = replace(HEAD, rate=lambda length: 0.75, step_seconds=0.6)
"""It pays a little."""
WRONG = replace(HEAD, rate=lambda length: 0.0)


def decoded(effort: str, arm: SimulatedArm) -> Run:
    return Machine((arm,), aim=Aim(effort=EFFORTS[effort])).decode(TOKENS)


def found(effort: str, begins: int) -> int:
    """Tokens until a head that is of no use before token ``begins`` drafts in most steps from there on."""
    run = decoded(effort, replace(HEAD, rate=lambda length: 0.85 if length >= begins else 0.0))
    asked = (step for step in range(16, run.steps) if sum(map(bool, run.asked[step - 16 : step])) >= 8)
    return next((run.lengths[step] for step in asked if run.lengths[step] >= begins), TOKENS) - begins


def test_more_effort_finds_sooner_what_begins_to_pay() -> None:
    """Wherever it begins, in the mean; low effort never finds out."""
    begins = range(150, 750, 50)
    low, medium, high = (fmean(found(effort, each) for each in begins) for effort in EFFORTS)
    assert high < 0.7 * medium
    assert low == TOKENS - fmean(begins)


def test_low_effort_makes_no_trials() -> None:
    """After its first drafts have failed, a drafter that is always wrong is never asked again."""
    assert not any(decoded("low", WRONG).asked[20:])
    assert any(decoded("medium", WRONG).asked[20:])


@pytest.mark.parametrize("effort", EFFORTS)
def test_trials_cost_no_more_than_their_share(effort: str) -> None:
    plain = 1.0
    assert decoded(effort, WRONG).speed > plain - EFFORTS[effort].trials - 0.002


def test_low_effort_drafts_only_what_surely_pays() -> None:
    low, medium = decoded("low", NEARLY), decoded("medium", NEARLY)
    assert medium.verified["0"] > 0.4 * medium.steps
    assert low.verified["0"] < 0.1 * low.steps
