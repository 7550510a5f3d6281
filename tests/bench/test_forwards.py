"""What forwards cost: measured as rows of results, and read back as prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parlay import models
from parlay.bench.forwards import ForwardPrices, TimedModel, curves, is_forward, measure, prices, read_prices
from parlay.bench.records import Cell, Results, Row
from parlay.system import threads

TABLE = ForwardPrices("m", {0: [(1, 1.0), (3, 2.0), (5, 2.0)], 100: [(1, 2.0), (3, 4.0)]})


def forward(rows: int, seconds: float, context: int = 64, model: str = "m") -> Row:
    cell = Cell(model=model, strategy="forward", workload=f"rows {rows}", context=context)
    return Row(cell=cell, steps=1, tokens=rows, verify_seconds=seconds)


@pytest.mark.parametrize(
    ("rows", "context", "seconds"),
    [(1, 0, 1.0), (2, 0, 1.5), (9, 0, 2.0), (1, 50, 1.5), (3, 100, 4.0), (5, 100, 6.0), (1, 200, 3.0)],
)
def test_prices_lie_on_straight_lines(rows: int, context: int, seconds: float) -> None:
    assert TABLE.forward(rows, context) == pytest.approx(seconds)


def test_a_price_is_the_median_and_never_more_than_a_larger_forwards() -> None:
    rows = [forward(1, seconds) for seconds in (3.0, 9.0, 1.0)] + [forward(2, 2.5), forward(4, 5.0)]
    assert curves(rows, "m") == {64: [(1, 2.5), (2, 2.5), (4, 5.0)]}


def test_measured_forwards_are_rows_of_results_that_can_be_read_back(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.jsonl", {})
    mini = {"parlay-mini": TimedModel(models.load("parlay-mini"))}
    results.add(list(measure(mini, (1, 4), (8, 1 << 20), passes=2)))
    timed = [row for row in results.rows if row.steps]
    assert [(row.cell.context, row.tokens, row.round) for row in timed] == [(8, 1, 0), (8, 4, 0), (8, 1, 1), (8, 4, 1)]
    assert all(is_forward(row) for row in results.rows)
    assert results.rows[-1].note.startswith("no room for")
    read = read_prices(tmp_path / "r.jsonl")
    assert read.model == "parlay-mini"
    assert 0 < read.forward(1, 8) <= read.forward(4, 8)


def test_models_take_turns_on_their_own_threads_beside_the_reading_of_their_weights() -> None:
    usual, runner = threads.count(), models.load("parlay-mini")
    seen = []
    for row in measure({"one": TimedModel(runner, 1000, 1), "usual": TimedModel(runner)}, (1, 2), (8,), passes=2):
        seen.append((row.cell.model, row.tokens))
    assert seen == 2 * [("one", 1), ("usual", 1), ("one", 2), ("usual", 2), ("one", 0)]
    assert threads.count() == usual


def test_prices_are_those_of_one_model() -> None:
    with pytest.raises(ValueError, match="no timed forwards"):
        prices([replace(forward(1, 1.0), steps=0)], "x.jsonl")
    with pytest.raises(ValueError, match="forwards of m, n: it must hold timed forwards of one model"):
        prices([forward(1, 1.0), forward(1, 1.0, model="n")], "x.jsonl")
