"""The measured cost: monotone, robust, quick to calibrate."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from parlay.cost.measured import ROWS, MeasuredCost
from parlay.cost.timing import calibrate
from parlay.types import NO_SKIP, Exactness, KeptCost, Output, RunnerSpec, Segment, Skip


def true_seconds(rows: int) -> float:
    return 0.004 * (1 + 0.05 * (rows - 1))


def test_without_data_it_guesses_something_sane() -> None:
    """Positive, rising, and far from linear in rows: else nothing would ever be drafted."""
    cost = MeasuredCost()
    assert 0 < cost.forward(1, 100) < cost.forward(16, 100) < 4 * cost.forward(1, 100)


def test_the_first_record_sets_the_level_of_a_guess() -> None:
    cost = MeasuredCost()
    shape = cost.forward(16, 0) / cost.forward(1, 0)
    cost.record(1, 50, 0.002)
    assert cost.forward(1, 50) == pytest.approx(0.002)
    assert cost.forward(16, 50) == pytest.approx(0.002 * shape)
    assert cost.forward(1, 100_000) == pytest.approx(0.002)


def test_it_goes_through_samples_and_straight_in_between_and_beyond() -> None:
    cost = MeasuredCost({1: 1.0, 4: 1.3, 16: 2.5})
    assert [cost.forward(rows, 0) for rows in (1, 2, 4, 10, 16, 32, 1000)] == pytest.approx(
        [1.0, 1.1, 1.3, 1.9, 2.5, 4.1, 2.5 + 984 * 0.1]
    )


def test_it_never_says_that_a_larger_forward_is_cheaper() -> None:
    cost = MeasuredCost({1: 5.0, 2: 1.0, 8: 3.0, 16: 2.0, 32: 4.0})
    coin = random.Random(0)
    for _ in range(2000):
        cost.record(coin.randrange(1, 700), coin.choice((10, 900, 5000)), coin.uniform(0.5, 9))
        context = coin.choice((10, 900, 5000))
        seconds = [cost.forward(rows, context) for rows in (*range(1, 70), 100, 300, 512, 600, 1000)]
        assert seconds == sorted(seconds)


def test_it_finds_the_true_cost_under_noise() -> None:
    """One forward in ten is three times too slow, and the rest jitter upwards."""
    cost, coin = MeasuredCost(), random.Random(1)
    for _ in range(3000):
        rows = coin.choice((1, 2, 5, 9, 17, 33))
        delay = 3.0 if coin.random() < 0.1 else coin.uniform(1.0, 1.2)
        cost.record(rows, 300, true_seconds(rows) * delay)
    for rows in (1, 2, 5, 9, 17, 33):
        assert cost.forward(rows, 300) == pytest.approx(true_seconds(rows), rel=0.25)


def test_one_slow_forward_moves_little() -> None:
    cost = MeasuredCost({1: 1.0, 16: 1.5})
    cost.record(1, 0, 50.0)
    assert cost.forward(1, 0) < 1.06


@pytest.mark.parametrize(("share", "factor"), [(0.01, 50.0), (0.05, 20.0), (0.1, 10.0), (0.3, 5.0)])
def test_delays_of_any_size_hardly_count(share: float, factor: float) -> None:
    """What rows cost beside each other stays; so do the estimates, unless several slow steps in a row are usual."""
    cost, coin = MeasuredCost({1: 1.0, 16: 1.6}), random.Random(2)
    for _ in range(1000):
        rows = coin.choice((1, 1, 16))
        seconds = (1.0 if rows == 1 else 1.6) * coin.uniform(1.0, 1.1)
        cost.record(rows, 300, seconds * (factor if coin.random() < share else 1.0))
        assert share > 0.1 or 0.9 < cost.forward(1, 300) < 1.5
        assert 1.4 < cost.forward(16, 300) / cost.forward(1, 300) < 1.8


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("slow", [0.0, 0.1])
def test_a_machine_that_changes_for_good_is_followed_within_thirty_steps(rows: int, factor: float, slow: float) -> None:
    """Row counts that are not being measured as well, or nothing would be drafted on a machine that became quicker."""
    cost, coin = MeasuredCost({1: 1.0, 16: 1.6}), random.Random(3)

    def measure(seconds: float) -> None:
        cost.record(rows, 300, seconds * coin.uniform(1.0, 1.05) * (10.0 if coin.random() < slow else 1.0))

    for _ in range(100):
        measure(cost.forward(rows, 300) / cost.forward(1, 300))
    before = cost.forward(16, 300) / cost.forward(1, 300)
    for _ in range(30):
        measure(factor * (1.0 if rows == 1 else 1.6))
    assert cost.forward(rows, 300) == pytest.approx(factor * (1.0 if rows == 1 else 1.6), rel=0.15)
    assert cost.forward(16, 300) / cost.forward(1, 300) == pytest.approx(before, rel=0.15)


def test_a_slow_first_step_is_forgotten() -> None:
    """Nothing was timed at start, and the first of all forwards took fifty times too long."""
    cost = MeasuredCost()
    for seconds in (0.1, 0.002, 0.002, 0.003):
        cost.record(1, 50, seconds)
    assert cost.forward(1, 50) == pytest.approx(0.002)


def test_a_process_that_was_stopped_in_its_first_forward_of_many_rows_learns_no_nonsense() -> None:
    """Several forwards of fewer rows would do the same work."""
    assert MeasuredCost({1: 1.0, 16: 50_000.0}).forward(16, 0) == 16
    cost = MeasuredCost({1: 1.0, 2: 1.1, 4: 1.2})
    cost.record(64, 10, 50_000.0)
    assert cost.forward(64, 10) <= 1.2 * 16
    cost.record(64, 10, 3.0)
    assert cost.forward(64, 10) == pytest.approx(3.0)


def test_rows_that_seemed_dear_once_are_tried_again() -> None:
    """They were timed at a slow moment, and nobody has used them since."""
    cost = MeasuredCost({1: 1.0, 16: 12.0, 32: 12.0})
    for _ in range(600):
        cost.record(1, 300, 1.0)
    assert cost.forward(16, 300) < 2.5
    cost.record(16, 300, 8.0)
    assert cost.forward(16, 300) == pytest.approx(8.0), "and if they are dear, that is known at once"


def test_what_steps_have_shown_to_be_dear_stays_known_while_it_is_not_used() -> None:
    """Otherwise a policy would draft so many nodes every few hundred steps, and lose each time."""
    cost = MeasuredCost({1: 1.0, 16: 1.5})
    for _ in range(100):
        cost.record(1, 300, 1.0)
        cost.record(16, 300, 4.0)
    for _ in range(1000):
        cost.record(1, 300, 1.0)
    assert cost.forward(16, 300) == pytest.approx(4.0, rel=0.2)


def test_rows_that_turn_out_dearer_beside_others_are_learnt() -> None:
    cost, coin = MeasuredCost({1: 1.0, 16: 1.6}), random.Random(4)
    for _ in range(200):
        rows = coin.choice((1, 16))
        cost.record(rows, 300, 1.0 if rows == 1 else 3.2)
    assert cost.forward(16, 300) / cost.forward(1, 300) == pytest.approx(3.2, rel=0.1)


def test_contexts_are_told_apart() -> None:
    cost = MeasuredCost({1: 1.0, 16: 1.5})
    for _ in range(200):
        cost.record(16, 8000, 4.0)
    assert cost.forward(16, 100) == 1.5
    assert cost.forward(16, 8000) > 3.5


class SlowRunner:
    """Its clock, ``now``, goes on by what a forward takes; ``begun``: seconds for each 16 rows begun later."""

    def __init__(self, seconds_per_forward: float, fits: bool = True, begun: float = 0.0) -> None:
        self.seconds = seconds_per_forward
        self.begun = begun
        self.fits = fits
        self.now = 0.0
        self.names: set[int] = set()

    spec = RunnerSpec("slow", 4, 128, "tree", Exactness.SEED, 1, 1, "cpu", "float32", "none")

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        self.names.add(sequence)
        return 0

    def reserve(self, sequence: int, tokens: int) -> bool:
        return self.fits

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        assert {segment.sequence for segment in segments} <= self.names
        rows = sum(segment.rows for segment in segments)
        self.now += self.seconds * (1 + 0.1 * rows) + self.begun * ((rows - 1) // 16)
        return Output(torch.zeros(rows, 4), (0, rows))

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        raise AssertionError("calibration caches nothing")

    def truncate(self, sequence: int, length: int) -> int:
        raise AssertionError("calibration caches nothing")

    def fork(self, sequence: int, copy: int) -> None:
        raise AssertionError("calibration forks nothing")

    def release(self, sequence: int) -> None:
        self.names.discard(sequence)

    def free_tokens(self) -> int:
        return 64

    def check(self) -> None:
        return None


def test_calibration_measures_the_shape_and_leaves_nothing_behind() -> None:
    runner = SlowRunner(0.001)
    cost = calibrate(runner, clock=lambda: runner.now)
    assert cost.forward(32, 0) / cost.forward(1, 0) == pytest.approx(4.2 / 1.1)
    assert not runner.names


def test_a_jump_behind_sixteen_rows_is_known_where_time_for_it_is_left() -> None:
    """Sixteen requests at once then draft no single token that can't pay for it."""
    runner = SlowRunner(0.017, begun=0.008)
    cost = calibrate(runner, clock=lambda: runner.now)
    assert runner.now < 0.35
    assert cost.forward(17, 0) == pytest.approx(0.017 * 2.7 + 0.008)


def test_calibration_of_a_slow_model_stops_early() -> None:
    runner = SlowRunner(0.1)
    cost = calibrate(runner, clock=lambda: runner.now)
    assert runner.now < 1
    assert cost.forward(1, 0) > 0.1


def test_calibration_without_room_guesses() -> None:
    runner = SlowRunner(0.001, fits=False)
    assert calibrate(runner).forward(1, 0) > 0
    assert not runner.names


def test_a_model_of_short_texts_is_not_timed_beyond_them() -> None:
    runner = SlowRunner(0.001)
    runner.spec = replace(runner.spec, max_context=32)
    assert calibrate(runner).forward(1, 0) > 0
    assert runner.now == 0


def kept_after(seconds: Callable[[int], float], steps: int = 400) -> KeptCost:
    """By a process whose steps took so long by their rows."""
    cost, coin = MeasuredCost({1: 1.0, 64: 9.0}), random.Random(2)
    for _ in range(steps):
        rows = coin.choice((1, 2, 4, 8))
        cost.record(rows, 300, seconds(rows) * coin.uniform(1.0, 1.1))
    return cost.kept()


def test_a_later_process_knows_what_rows_cost_beside_each_other_at_its_own_speed() -> None:
    """Though it times rows at a moment at which each larger forward is delayed."""
    kept = kept_after(true_seconds)
    delayed = [(rows, 3 * true_seconds(rows) * (1 if rows == 1 else 1.6)) for _ in range(3) for rows in (1, 2, 4, 8)]
    cost = MeasuredCost.restored(kept, delayed)
    for rows in (1, 2, 4, 8):
        assert cost.forward(rows, 300) == pytest.approx(3 * true_seconds(rows), rel=0.35)
    fresh = MeasuredCost({rows: min(s for count, s in delayed if count == rows) for rows in (1, 2, 4, 8)})
    truth = true_seconds(4) / true_seconds(1)
    assert abs(cost.forward(4, 300) / cost.forward(1, 300) - truth) < 0.5 * abs(
        fresh.forward(4, 300) / fresh.forward(1, 300) - truth
    )


def test_what_was_kept_wrongly_is_corrected_by_steps() -> None:
    """As where another program took half of the machine all the time."""
    cost = MeasuredCost.restored(kept_after(lambda rows: float(rows)), [(1, true_seconds(1))])
    for _ in range(200):
        for rows in (1, 4):
            cost.record(rows, 300, true_seconds(rows))
    assert cost.forward(4, 300) / cost.forward(1, 300) == pytest.approx(true_seconds(4) / true_seconds(1), rel=0.2)


def test_a_process_of_few_steps_keeps_nothing_and_contexts_stay_apart() -> None:
    assert kept_after(true_seconds, steps=8) == {}
    cost = MeasuredCost({1: 1.0, 64: 2.0})
    for _ in range(100):
        cost.record(1, 100, 1.0)
        cost.record(1, 3000, 2.0)
    again = MeasuredCost.restored(cost.kept(), [(1, 0.5)])
    assert again.forward(1, 3000) / again.forward(1, 100) == pytest.approx(2.0, rel=0.1)


def test_what_is_known_of_long_texts_does_not_drift_while_only_short_ones_are_decoded() -> None:
    """Over processes each of which starts while the machine is idle, and decodes while it is busy."""
    cost = MeasuredCost({1: 1.0, 64: 2.0})
    for _ in range(100):
        cost.record(1, 100, 1.0)
        cost.record(1, 3000, 2.0)
    for _ in range(6):
        cost = MeasuredCost.restored(cost.kept(), [(1, 1.0)])
        assert cost.forward(1, 3000) == pytest.approx(2.0, rel=0.1)
        for _ in range(100):
            cost.record(1, 100, 1.7)


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"512": ()},
        {"512": (1.0,) * 7},
        {"77": kept_after(true_seconds)["512"]},
        {"512": (float("nan"), *kept_after(true_seconds)["512"][1:])},
        {"512": (0.0, *kept_after(true_seconds)["512"][1:])},
        {"512": (1.0, 0.0, *kept_after(true_seconds)["512"][2:])},
        {"512": tuple(-number for number in kept_after(true_seconds)["512"])},
    ],
)
def test_numbers_that_no_process_learned_are_refused(kept: KeptCost) -> None:
    with pytest.raises(ValueError, match=r"estimates|no time"):
        MeasuredCost.restored(kept, [(1, 0.5)])


def test_calibration_goes_on_from_what_was_kept_or_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    runner = SlowRunner(0.001)
    cost = calibrate(runner, kept=kept_after(true_seconds), clock=lambda: runner.now)
    assert cost.forward(512, 0) / cost.forward(64, 0) == pytest.approx(512 / 64, rel=0.3), "as kept: never timed here"
    assert not runner.names
    assert not caplog.records
    cost = calibrate(runner, kept={"512": (1.0,)}, clock=lambda: runner.now)
    assert cost.forward(32, 0) / cost.forward(1, 0) == pytest.approx(4.2 / 1.1)
    assert ["measured again" in each.getMessage() for each in caplog.records] == [True]


@pytest.mark.parametrize(("place", "seconds"), [(0, 1e-320), (1, 1e-320), (len(ROWS), 1e300)])
def test_kept_seconds_that_no_forward_takes_are_refused(place: int, seconds: float) -> None:
    kept = kept_after(lambda rows: float(rows))
    numbers = list(kept["512"])
    numbers[place] = seconds
    with pytest.raises(ValueError, match="takes no time, or years"):
        MeasuredCost.restored({**kept, "512": tuple(numbers)})
