"""The page on `auto` compares it with the best of the others in each setting, and with plain decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planning import ARMS, measure
from benchmarks.router import STATIC
from benchmarks.router_cells import LARGEST, left_over, settings, spread
from benchmarks.router_page import report
from parlay.bench.records import PLAIN, Cell, Results, Row
from parlay.bench.runner import BenchPlan
from parlay.bench.workloads import Workload

CELL = Cell(model="m", strategy="auto", workload="prose")


def rows(speeds: dict[str, float], workload: str) -> list[Row]:
    return [
        Row(
            cell=replace(CELL, strategy=strategy, workload=workload),
            requests=1,
            tokens=101,
            decode_tokens=100,
            decode_seconds=100 / speed,
            seconds=100 / speed,
            steps=100,
            same=1,
            of=1,
        )
        for strategy, speed in speeds.items()
    ]


@pytest.fixture
def page(tmp_path: Path) -> str:
    results = Results(tmp_path / "router.jsonl", {"command": "test", **HEADER}, fresh=True)
    best = dict.fromkeys(STATIC, 100.0)
    results.add(rows({PLAIN: 100, **best, STATIC[1]: 200, "auto": 180}, "prose"))
    results.add(rows({PLAIN: 100, **best, STATIC[0]: 50, "auto": 90}, "edit"))
    return report(results.header, results.rows, 9)


HEADER = {
    "machine": {"cpu": "c", "cores": 2, "capability": "x", "memory_gib": 1, "system": "s"},
    "versions": {},
    "environment": {},
    "threads": 2,
    "commit": "c",
    "date": "d",
}


def test_auto_is_compared_with_the_best_of_each_setting_plain_decoding_among_them(page: str) -> None:
    """180 of 200, and 90 of plain decoding's 100 where nothing pays."""
    assert "Of the best in hindsight: 0.90 in geometric mean" in page
    assert "0.90 in the least cell" in page
    assert f"The best single strategy, `{STATIC[1]}`: 1.41" in page


def test_the_page_says_how_many_of_the_cells_were_measured_and_how_often(page: str) -> None:
    assert "Measured: 2 of 9 cells, rounds of each: 1." in page


def test_auto_is_compared_with_the_one_strategy_that_is_best_over_all_cells(page: str) -> None:
    """1.8 and .9 of plain decoding, against 2 and 1."""
    assert "`auto` over it: 0.90 in geometric mean" in page


def test_luck_has_no_part_in_what_auto_is_compared_with(tmp_path: Path) -> None:
    """In each round another strategy is ahead by chance: what the other round calls the best has 100 there."""
    results = Results(tmp_path / "router.jsonl", {"command": "test", **HEADER}, fresh=True)
    for number in (0, 1):
        lucky = {STATIC[place]: 120.0 if place == number else 100.0 for place in (0, 1)}
        measured = rows({PLAIN: 90, **lucky, "auto": 100}, "prose")
        results.add([replace(row, round=number) for row in measured])
    page = report(results.header, results.rows, 1)
    assert "so that luck has no part in the choice: 1.00, least 1.00." in page


def test_one_round_can_t_tell_luck(page: str) -> None:
    assert "luck" not in page


def test_a_strategy_that_fails_on_a_model_counts_as_plain_decoding(tmp_path: Path) -> None:
    results = Results(tmp_path / "router.jsonl", {"command": "test", **HEADER}, fresh=True)
    results.add(rows({PLAIN: 100, "auto": 100}, "prose"))
    results.add([Row(cell=replace(CELL, strategy="eagle3"), error="no head")])
    page = report(results.header, results.rows, 1)
    assert "Of the best in hindsight: 1.00" in page
    assert "no head" in page


def test_a_page_without_a_measured_cell_says_so() -> None:
    assert "Measured: 0 of 5 cells" in report({"command": "test", **HEADER}, [], 5)


def plan(
    model: str,
    kinds: str,
    concurrency: tuple[int, ...] = (1,),
    temperatures: tuple[float, ...] = (0.0,),
    contexts: tuple[int, ...] = (0,),
) -> BenchPlan:
    return BenchPlan(
        model=model,
        strategies=(),
        workloads=tuple(Workload(kind, ()) for kind in kinds),
        concurrency=concurrency,
        temperatures=temperatures,
        contexts=contexts,
    )


def test_the_first_cells_of_the_order_hold_every_value_about_equally_often() -> None:
    wanted = settings([plan(model, "uvwxyz", (1, 4, 16, 64), (0.0, 1.0), (0, 512)) for model in "ab"])
    order = spread(wanted)
    assert sorted(order) == sorted(wanted)
    for place in range(5):
        counts = Counter((model, *conditions)[place] for model, conditions in order[:24])
        assert max(counts.values()) - min(counts.values()) <= 2


def test_cells_with_too_many_tokens_to_feed_are_left_out() -> None:
    found = settings([plan("a", "u", (1, 64), (0.0,), (LARGEST,))])
    assert {conditions.concurrency for _, conditions in found} == {1}


def test_a_run_goes_on_with_what_is_lacking_round_by_round() -> None:
    one, two = settings([plan("a", "uv")])
    done = {one: 1, two: 0}
    assert list(left_over((one, two), 2, lambda each: done[each])) == [two, one, two]


def test_the_routers_own_work_is_timed_with_and_without_a_head() -> None:
    assert all(0 < measure(arms, 2, steps=4) < 1 for arms in ARMS.values())
