"""Those who stream get a token in each step, and wait no longer for it than a step may take, while a long prompt is
read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from parlay.engine import Engine, Limits
from parlay.testing.conformance.stage import Steady
from parlay.types import NO_SKIP, Output, Segment, Skip
from tests.engine.test_shares import Watched, request
from tests.engine.toy_engine import PLAIN

PROMPT = 1500


@dataclass
class Priced(Steady):
    """A forward takes ``weights`` seconds, and ``row`` more for each row."""

    weights: float
    row: float

    def forward(self, rows: int, context: int) -> float:
        return self.weights + self.row * rows


@pytest.mark.parametrize(
    ("weights", "row", "longest"),
    [
        pytest.param(0.02, 0.002, 0.25, id="a quarter of a second"),
        pytest.param(0.2, 0.01, 4 * 0.21, id="four times a stream's step"),
        pytest.param(0.02, 0.3, 4 * 0.32, id="few rows at a time"),
        pytest.param(0.005, 0.0001, 0.005 + 0.0512, id="all rows, as they take no longer"),
    ],
)
def test_a_step_beside_a_stream_reads_as_much_of_a_prompt_as_its_seconds_allow(
    weights: float, row: float, longest: float
) -> None:
    runner, cost = Watched(), Priced(weights, row)
    engine = Engine(runner, cost, Limits())
    engine.add(request("stream", "", tokens=2000), PLAIN)
    engine.step()
    engine.add(request("long", "", prompt=PROMPT, tokens=2), PLAIN)
    runner.rows.clear()
    while sum(runner.rows) - len(runner.rows) < PROMPT:
        events = engine.step()
        assert [len(event.committed.tokens) for event in events if event.request == "stream"] == [1]
    steps = [cost.forward(rows, 0) for rows in runner.rows]
    assert max(steps) <= longest + 1e-9
    assert max(steps) > longest - row - 1e-9, "no less than may be"


def test_alone_a_prompt_is_read_in_the_largest_steps() -> None:
    runner = Watched()
    engine = Engine(runner, Priced(0.02, 0.002), Limits())
    engine.add(request("long", "", prompt=PROMPT, tokens=1), PLAIN)
    while not engine.step():
        pass
    assert max(runner.rows) == Limits().max_rows


class Late(Watched):
    """A forward takes four times as long as ``cost`` expects."""

    def __init__(self, cost: Priced) -> None:
        super().__init__()
        self.now, self._cost = 0.0, cost

    def forward(self, segments: list[Segment], taps: tuple[int, ...] = (), skip: Skip = NO_SKIP) -> Output:  # type: ignore[override]
        self.now += 4 * self._cost.forward(sum(len(segment.pending) for segment in segments), 0)
        return super().forward(segments, taps, skip)


def test_steps_that_take_longer_than_expected_become_smaller() -> None:
    """As behind a long text, of which costs are learned slowly."""
    cost = Priced(0.004, 0.002)
    runner = Late(cost)
    engine = Engine(runner, cost, Limits(), clock=lambda: runner.now)
    engine.add(request("stream", "", tokens=2000), PLAIN)
    engine.step()
    engine.add(request("long", "", prompt=PROMPT, tokens=2), PLAIN)
    seconds = []
    for _ in range(8):
        began = runner.now
        engine.step()
        seconds.append(runner.now - began)
    assert seconds[0] > 0.9
    assert 0.2 < seconds[-1] < 0.3
    assert seconds == sorted(seconds, reverse=True)
