"""The regression check fails for what is slower, different or missing, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.smoke import BOUNDS, Bounds, failures
from parlay.bench.records import Cell, Row
from parlay.bench.summary import summarise
from parlay.strategies.spelling import parse

PLAIN = Row(
    cell=Cell(model="parlay-mini", strategy="none", workload="edit"),
    requests=1,
    tokens=10,
    decode_tokens=10,
    decode_seconds=4.0,
    same=1,
    of=1,
)
FAST = replace(PLAIN, cell=replace(PLAIN.cell, strategy="prompt-lookup"), decode_seconds=1.0)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (FAST, None),
        (replace(FAST, decode_seconds=3.0), "1.33 times none, at least 3.00 is wanted"),
        (replace(FAST, same=0), "the text differs"),
        (replace(FAST, error="it broke"), "it broke"),
        (Row(cell=FAST.cell, note="all left out"), "all left out"),
    ],
)
def test_what_is_slower_different_or_missing_is_named(row: Row, complaint: str | None) -> None:
    bounds = replace(Bounds.read(BOUNDS), least={"edit": {"prompt-lookup": 3.0}})
    found = failures(bounds, summarise([PLAIN, row]))
    assert len(found) == (complaint is not None)
    assert complaint is None or (complaint in found[0] and "prompt-lookup on edit" in found[0])


def test_the_committed_bounds_are_of_workloads_and_strategies_that_exist() -> None:
    bounds = Bounds.read(BOUNDS)
    assert {workload.name for workload in bounds.plan.workloads} == set(bounds.least)
    for name in bounds.plan.strategies:
        parse(name)
