"""Where the speed of memory changes, rows soon have the right prices beside each other, though no step showed them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from parlay.cost.measured import MeasuredCost
from parlay.cost.memory_speed import MemorySpeed

ARITHMETIC = {1: 7.0, 2: 10.3, 4: 13.5, 6: 16.5, 8: 20.0, 16: 43.0}
"""Milliseconds that rows take with all weights at hand, as measured with a model of 1.5 billion parameters."""
FAST, SLOW = 13.4, 20.6
"""Milliseconds in which memory gives these weights."""


def seconds_of(rows: int, reading: float) -> float:
    return 1e-3 * float(ARITHMETIC[rows] ** 5 + reading**5) ** 0.2


@dataclass
class Machine:
    """Time passes here only if a test says so. ``readings``: the next measurements of memory, before ``reading``."""

    reading: float = FAST
    now: float = 0.0
    readings: list[float] = field(default_factory=list)
    asked: int = 0

    def read(self) -> float:
        self.asked += 1
        return 1e-3 * (self.readings.pop(0) if self.readings else self.reading)

    def memory(self) -> MemorySpeed:
        memory = MemorySpeed(self.read, lambda: self.now)
        memory.begin()
        return memory

    def decode(self, cost: MeasuredCost, steps: int, *counts: int) -> None:
        """Run steps of these row counts in turn; of all row counts if none is named."""
        for step in range(steps):
            rows = (counts or tuple(ARITHMETIC))[step % len(counts or ARITHMETIC)]
            self.now += seconds_of(rows, self.reading)
            cost.record(rows, 300, seconds_of(rows, self.reading))


def known(reading: float, memory: MemorySpeed | None = None) -> MeasuredCost:
    """Estimates that begin with what forwards take while memory gives the weights in ``reading`` milliseconds."""
    return MeasuredCost({rows: seconds_of(rows, reading) for rows in ARITHMETIC}, memory)


def truth(reading: float) -> list[float]:
    return [seconds_of(rows, reading) / seconds_of(1, reading) for rows in ARITHMETIC]


def beside_one_row(cost: MeasuredCost) -> list[float]:
    return [cost.forward(rows, 300) / cost.forward(1, 300) for rows in ARITHMETIC]


@pytest.mark.parametrize(("before", "after", "error"), [(FAST, SLOW, 0.03), (SLOW, FAST, 0.09)])
def test_prices_are_right_within_two_seconds_of_a_change(before: float, after: float, error: float) -> None:
    """While memory is slow, two and four rows take nearly as long as one: that tells less of their arithmetic."""
    machine = Machine(before)
    cost = known(before, machine.memory())
    machine.decode(cost, 200)
    revision, machine.reading = cost.revision, after
    machine.decode(cost, int(2.0 / seconds_of(4, after)), 4)
    assert cost.revision > revision
    assert beside_one_row(cost) == pytest.approx(truth(after), rel=error)
    assert cost.forward(4, 300) == pytest.approx(seconds_of(4, after), rel=0.05)


def test_what_fast_memory_has_shown_is_not_forgotten_while_it_is_slow() -> None:
    machine = Machine(SLOW)
    cost = known(SLOW, machine.memory())
    for reading in (FAST, SLOW, FAST):
        machine.reading = reading
        machine.decode(cost, 400, *((4, 6) if reading == SLOW else ()))
    machine.reading = SLOW
    machine.decode(cost, 100, 6)
    assert beside_one_row(cost) == pytest.approx(truth(SLOW), rel=0.04)


def test_without_measurements_of_memory_all_rows_move_together() -> None:
    machine = Machine()
    cost = known(FAST)
    machine.decode(cost, 200)
    before, machine.reading = beside_one_row(cost), SLOW
    machine.decode(cost, 100, 4)
    assert beside_one_row(cost) == pytest.approx(before, rel=0.1)


def test_a_later_process_converts_what_was_kept_while_memory_was_faster() -> None:
    machine = Machine()
    cost = known(FAST, machine.memory())
    machine.decode(cost, 200)
    machine.reading = SLOW
    again = MeasuredCost.restored(cost.kept(), [(1, seconds_of(1, SLOW))], machine.memory())
    for rows in ARITHMETIC:
        assert again.forward(rows, 300) == pytest.approx(seconds_of(rows, SLOW), rel=0.05)


def test_what_was_kept_without_measurements_of_memory_holds_for_its_present_speed() -> None:
    cost = known(SLOW)
    Machine(SLOW).decode(cost, 200)
    machine = Machine(SLOW)
    again = MeasuredCost.restored(cost.kept(), [(1, seconds_of(1, SLOW))], machine.memory())
    machine.reading = FAST
    machine.decode(again, 150, 4)
    assert beside_one_row(again) == pytest.approx(truth(FAST), rel=0.09)


def test_memory_is_measured_twice_a_second_and_single_delays_count_for_nothing() -> None:
    machine = Machine()
    memory = machine.memory()
    machine.readings = [13.0, 900.0, 13.5, 14.0]
    begun = machine.asked
    for _ in range(1000):
        machine.now += 0.004
        assert not memory.look()
    assert 8 <= machine.asked - begun <= 10
    assert memory.seconds == pytest.approx(1e-3 * FAST)


def test_measurements_that_failed_are_left_out() -> None:
    machine = Machine(0.0)
    memory = machine.memory()
    assert memory.seconds == 0
    cost = known(FAST, memory)
    before = beside_one_row(cost)
    cost.record(1, 300, seconds_of(1, FAST))
    assert beside_one_row(cost) == pytest.approx(before, rel=0.02)
    machine.reading, machine.now = FAST, machine.now + 60
    assert memory.look()
    assert memory.seconds == pytest.approx(1e-3 * FAST)
