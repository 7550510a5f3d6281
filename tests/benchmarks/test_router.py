"""The page on `auto` compares it with the best of the others in each setting, and with plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planning import ARMS, measure
from benchmarks.router import STATIC, report
from parlay.bench.records import PLAIN, Cell, Results, Row

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
    return report(results)


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


def test_the_routers_own_work_is_timed_with_and_without_a_head() -> None:
    assert all(0 < measure(arms, 2, steps=4) < 1 for arms in ARMS.values())
