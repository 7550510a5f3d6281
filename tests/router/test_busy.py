"""The adaptive policy and the measured cost on machines that others use too: noise changes no decision for long."""

from __future__ import annotations

from statistics import fmean

import pytest

from parlay.router.prices import DraftSeconds
from tests.router.machines import Delay, Drafting, bursts, idle, phases, simulate, spikes

BUSY = {
    "1 % of steps 50 times slower": spikes(0.01, 50),
    "5 % 20 times": spikes(0.05, 20),
    "10 % 5 times": spikes(0.1, 5),
    "10 % 10 times": spikes(0.1, 10),
    "ten steps in a hundred 10 times": bursts(100, 10, 10),
    "every other hundred 3 times": phases(100, 3),
}
PAYING = {
    "long copies": Drafting(rate=0.93, score=0.9, covers=0.6),
    "rare copies": Drafting(rate=0.85, score=0.8, covers=0.3),
    "short copies": Drafting(rate=0.55, score=0.55, covers=0.5),
    "a draft model": Drafting(rate=0.8, score=0.8, node_seconds=0.06),
}
LOSING = {
    "always wrong": Drafting(rate=0.0, score=0.7),
    "seldom right and dear": Drafting(rate=0.2, score=0.5, node_seconds=0.2),
    "nearly worth it": Drafting(rate=0.4, score=0.6, node_seconds=0.3, step_seconds=0.05),
}


def speed(drafting: Drafting, delay: Delay, tokens: int = 400) -> float:
    """Mean over five pairs of requests; plain decoding is 1."""
    return fmean(simulate(drafting, delay, tokens, requests=2, seed=seed).speed for seed in range(5))


@pytest.mark.parametrize("step_seconds", [0.005, 0.05])
def test_a_right_prediction_is_never_dropped(step_seconds: float) -> None:
    right = Drafting(rate=1.0, score=0.9, step_seconds=step_seconds)
    for seed in range(8):
        undisturbed = simulate(right, idle, 400, requests=2, seed=seed).steps
        for busy, delay in BUSY.items():
            assert simulate(right, delay, 400, requests=2, seed=seed).steps <= undisturbed + 4, busy


@pytest.mark.parametrize("factor", [5, 20, 50])
def test_a_right_prediction_survives_a_hold_up_right_after_it_was_read(factor: float) -> None:
    """Nothing was won yet that could pay for it; nor was it when the next proposal is held up too."""
    right = Drafting(rate=1.0, score=0.9)
    run = simulate(right, lambda step, coin: factor if step % 9 == 1 else 1.0, 200)
    assert run.steps <= simulate(right, idle, 200).steps + 1


@pytest.mark.parametrize("drafter", PAYING)
def test_what_pays_keeps_nine_tenths_of_its_gain(drafter: str) -> None:
    gain = speed(PAYING[drafter], idle) - 1
    assert gain > 0.3
    for busy, delay in BUSY.items():
        assert speed(PAYING[drafter], delay) - 1 > 0.9 * gain, busy


@pytest.mark.parametrize("busy", BUSY)
@pytest.mark.parametrize("drafter", LOSING)
def test_what_loses_is_not_kept(drafter: str, busy: str) -> None:
    for seed in range(8):
        assert simulate(LOSING[drafter], BUSY[busy], 400, requests=2, seed=seed).speed > 0.95


@pytest.mark.parametrize("drafter", PAYING)
def test_long_texts_on_a_machine_that_changes(drafter: str) -> None:
    """Costs are looked up for longer and longer contexts, first met while the machine is slow or while it is not."""
    calm = simulate(PAYING[drafter], idle, 5000).speed - 1
    assert simulate(PAYING[drafter], phases(150, 4), 5000).speed - 1 > 0.9 * calm


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_proposal_that_takes_another_time_for_good_is_known_within_thirty(factor: float) -> None:
    seconds = DraftSeconds()
    for _ in range(100):
        seconds.learn(4, 1.0, 10.0)
    for _ in range(30):
        seconds.learn(4, factor, 10.0)
    assert seconds.of(4) == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("slow", [0, 1, 20])
def test_one_slow_proposal_is_forgotten(slow: int) -> None:
    """Above all when it is one of the first."""
    seconds = DraftSeconds()
    for step in range(slow + 3):
        seconds.learn(4, 50.0 if step == slow and slow < 20 else 1.0, 10.0)
    assert seconds.of(4) == pytest.approx(1.0, rel=0.1)


def test_a_drafter_that_is_dear_every_other_time_is_dear() -> None:
    seconds = DraftSeconds()
    for step in range(200):
        seconds.learn(4, step % 2, 10.0)
    assert 0.25 < seconds.of(4) < 0.6
