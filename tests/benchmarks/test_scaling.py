"""The scaling law's arithmetic: what counts before a loop, the line, the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scaling.fit import fit
from benchmarks.scaling.lookahead import Point, Row, before, parse, spec, table, total
from parlay.strategies.spelling import parse as parse_strategy

OPTIONS = parse(["--out", "somewhere", "--ngram", "4", "--tokens", "50"])


def test_steps_count_up_to_the_loop_and_without_prefill() -> None:
    """Prefill's step commits 2; of the step that crosses token 7 a third lies before it."""
    row = before([(2, 90), (4, 10), (3, 12), (1, 14)], 7, Row(3, "code", 2, 0, 0, 0))
    assert row == Row(3, "code", 2, 5, pytest.approx(1 + 1 / 3), pytest.approx(10 + 4))


def test_a_step_that_commits_nothing_is_none() -> None:
    assert before([(1, 9), (0, 9), (2, 9)], 3, Row(0, "code", 2, 0, 0, 0)).steps == 1


def test_the_sum_over_texts_weighs_every_step_alike() -> None:
    rows = [Row(2, "code", 0, 30, 10, 100), Row(2, "prose", 0, 10, 10, 300), Row(4, "code", 0, 9, 1, 9)]
    assert total(rows, 2) == Point(2, 20, 2)
    assert total(rows, 2).steps == 50


def test_a_line_in_the_logarithm_is_found() -> None:
    line = fit([(x, 100 - 7 * power) for power, x in enumerate((1, 2, 4, 8, 16))])
    assert line is not None
    assert (line.start, line.slope, line.r_squared) == pytest.approx((100, -7, 1))
    assert line.at(32) == pytest.approx(65)
    assert line.words("rows") == "100.0 - 7.0 log2(rows), R² = 1.00"
    assert fit([(1, 1), (2, 2)]) is None
    assert fit([(2, 1), (2, 2), (2, 3)]) is None


@pytest.mark.parametrize("size", [0, 1, 64])
def test_every_size_is_a_strategy_of_the_catalogue(size: int) -> None:
    settings = parse_strategy(spec(OPTIONS, size)).settings
    assert (settings["window"], settings["guesses"], settings["ngram"]) == (size, size, 4)
    assert (settings["copy"], settings["policy"]) == (False, "fixed")


def test_the_table_has_a_line_per_size_and_a_column_per_kind() -> None:
    rows = [Row(0, "code", 0, 30, 30, 30), Row(4, "code", 0, 30, 15, 150)]
    text = table(rows, [total(rows, size) for size in (0, 4)], None, OPTIONS)
    assert "| W = G | rows per step | steps per 100 tokens | tokens per step | code |" in text
    assert "| 4 | 10.0 | 50.0 | 2.00 | 2.00 |" in text
    assert OPTIONS.out == Path("somewhere")
