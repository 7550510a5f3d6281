"""A router whose goal is energy, and one with a limit of power, on machines of which a model says what they draw."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from parlay.router.goals import EFFORTS, GOALS, Aim
from parlay.types import PowerModel
from tests.router.simulated_arms import Machine, Run, SimulatedArm, TableCost

FREE_ROWS = PowerModel(10.0, 0.0, "measured: as simulated")
DEAR_ROWS = PowerModel(10.0, 8.0, "measured: as simulated")
"""A forward of one row takes one second, so it uses 18 J."""
HEAD = SimulatedArm(rate=lambda length: 0.7, step_seconds=0.1, node_seconds=0.02, most=8)
COPY = SimulatedArm(rate=lambda length: 0.9, replayable=True, most=31, score=0.9)
WRONG = SimulatedArm(rate=lambda length: 0.0, replayable=True, most=31, score=0.9)


def decoded(arm: SimulatedArm, power: PowerModel, goal: str = "throughput", watts: float = 0.0, many: int = 1) -> Run:
    return Machine((arm,), aim=Aim(goal=GOALS[goal], power=power, most_watts=watts)).decode(400, many)


def per_token(run: Run) -> float:
    return run.joules / run.tokens


def test_energy_decodes_plainly_where_a_drafter_saves_time_and_costs_energy() -> None:
    slow_head = replace(HEAD, rate=lambda length: 0.6, step_seconds=0.3)
    fast, thrifty = decoded(slow_head, DEAR_ROWS), decoded(slow_head, DEAR_ROWS, "energy")
    plain = DEAR_ROWS.watts + DEAR_ROWS.row_joules
    assert fast.speed > 1.3
    assert fast.verified["0"] > 0.8 * fast.steps
    assert per_token(fast) > 1.05 * plain
    assert thrifty.verified["0"] < 0.1 * thrifty.steps
    assert per_token(thrifty) < 1.02 * plain


def test_energy_drafts_as_throughput_does_where_rows_use_none() -> None:
    assert decoded(HEAD, FREE_ROWS, "energy") == decoded(HEAD, FREE_ROWS)


@pytest.mark.parametrize("many", [1, 8])
@pytest.mark.parametrize("arm", [COPY, HEAD, WRONG], ids=["copy", "head", "wrong"])
def test_energy_uses_no_more_of_it_than_other_goals_and_than_plain_decoding(arm: SimulatedArm, many: int) -> None:
    plain = DEAR_ROWS.watts * TableCost().forward(many, 0) / many + DEAR_ROWS.row_joules
    used = {goal: per_token(decoded(arm, DEAR_ROWS, goal, many=many)) for goal in GOALS}
    assert used["energy"] <= 1.01 * min(used.values())
    assert used["energy"] < 1.02 * plain


@pytest.mark.parametrize("many", [1, 4])
@pytest.mark.parametrize("probes", [3, 6, 16])
def test_probes_count_below_the_limit_of_power(probes: int, many: int) -> None:
    arm = replace(HEAD, ahead=probes, rate=lambda length: 0.95)
    for watts in (40.0, 60.0, 120.0):
        assert max(decoded(arm, DEAR_ROWS, watts=watts, many=many).watts) <= watts
    assert decoded(arm, DEAR_ROWS, watts=120.0, many=1).verified["0"] > 10, "where there is room for them they pay"


@pytest.mark.parametrize("many", [1, 4])
@pytest.mark.parametrize("arm", [COPY, HEAD], ids=["copy", "head"])
def test_no_step_draws_more_than_the_limit_and_below_it_drafts_still_pay(arm: SimulatedArm, many: int) -> None:
    limit = DEAR_ROWS.mean(3 * many, TableCost().forward(3 * many, 0))
    free, limited = (decoded(arm, DEAR_ROWS, watts=watts, many=many) for watts in (0.0, limit))
    assert max(free.watts) > limit
    assert max(limited.watts) <= limit
    assert limited.verified["0"] > 0.5 * limited.steps
    assert limited.speed > 1.1 * many / TableCost().forward(many, 0)


def jumpy(rows: int) -> float:
    """It takes half a second more from each fourth row on."""
    return 1 + 0.02 * (rows - 1) + 0.5 * (rows // 4)


def test_the_limit_holds_where_the_cost_of_rows_jumps() -> None:
    """Three rows draw more than four, and no less than is allowed."""
    aim = Aim(power=DEAR_ROWS, most_watts=DEAR_ROWS.mean(4, jumpy(4)))
    run = Machine((COPY,), TableCost(jumpy), aim=aim).decode(400)
    assert DEAR_ROWS.mean(3, jumpy(3)) > aim.most_watts
    assert run.verified["0"] > 0.5 * run.steps
    assert max(run.watts) <= aim.most_watts


def test_with_more_effort_trials_stay_below_the_limit_too() -> None:
    aim = Aim(effort=EFFORTS["high"], power=DEAR_ROWS, most_watts=40.0)
    run = Machine((HEAD, SimulatedArm(rate=lambda length: 0.2, most=8)), aim=aim).decode(600, 2)
    assert DEAR_ROWS.mean(2, 1.04) < max(run.watts) <= 40.0


def test_plain_decoding_above_the_limit_goes_on_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = decoded(COPY, DEAR_ROWS, watts=12.0)
    assert run.tokens == 400
    assert set(run.verified) == {"none"}
    (told,) = caplog.messages
    assert "plain decoding draws more than power=12 watts (requests at once: 1): nothing is drafted" in told


def test_joules_and_watts_need_a_model_of_the_machine() -> None:
    with pytest.raises(ValueError, match="must be known"):
        Aim(goal=GOALS["energy"])
    with pytest.raises(ValueError, match="must be known"):
        Aim(most_watts=50.0)
