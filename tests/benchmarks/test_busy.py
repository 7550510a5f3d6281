"""Beside busy processes: other engines are measured like strategies, and the page says which goals are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.busy.page import LLAMA, page
from benchmarks.busy.plans import EDIT, ENGINES, FORETOLD, KINDS, PEER_MODE, PREDICTION, PROSE, Lengths
from parlay.bench.provenance import provenance
from parlay.bench.records import PLAIN, Cell, Row
from parlay.strategies.entry import DEFAULT_STRATEGY

CELL = Cell(model="m", strategy=PLAIN, workload=PROSE)
LLAMA_CELL = replace(CELL, part=ENGINES, engine=LLAMA, strategy=PEER_MODE)
DRAFTED = replace(CELL, part=KINDS, strategy=DEFAULT_STRATEGY)
SPEEDS: Mapping[Cell, Sequence[float]] = {
    replace(CELL, part=ENGINES): (100, 50),
    LLAMA_CELL: (80, 10),
    replace(CELL, part=KINDS): (100, 50),
    DRAFTED: (100, 45),
    replace(CELL, part=KINDS, workload="copy"): (100, 50),
    replace(DRAFTED, workload="copy"): (300, 130),
    replace(CELL, part=FORETOLD, workload=EDIT): (100, 50),
    replace(CELL, part=FORETOLD, workload=EDIT, strategy=PREDICTION): (500, 250),
}
"""Idle, and beside two."""


def rows() -> list[Row]:
    return [
        Row(
            cell=replace(cell, busy=busy),
            round=turn,
            requests=1,
            tokens=100,
            steps=50 if cell.strategy == PREDICTION and busy else 20,
            decode_tokens=100,
            decode_seconds=100 / speed,
        )
        for cell, speeds in SPEEDS.items()
        for busy, speed in zip((0, 2), speeds, strict=True)
        for turn in range(2)
    ]


@pytest.fixture(scope="module")
def text() -> str:
    failed = Row(cell=replace(LLAMA_CELL, engine="transformers", busy=2), error="no | such place")
    return page(provenance("python -m benchmarks.busy"), [*rows(), failed])


def test_a_share_is_that_of_the_same_engines_idle_speed(text: str) -> None:
    assert "| parlay none | 100.0 (100.0-100.0) | 50.0 (50.0-50.0) *0.50 (0.50-0.50)* |" in text
    assert f"| {LLAMA} plain | 80.0 (80.0-80.0) | 10.0 (10.0-10.0) *0.12 (0.12-0.12)* |" in text


@pytest.mark.parametrize(
    "line",
    [
        "met: share of its idle speed that `none` keeps beside 2, on two cores: 0.50 (0.50-0.50), wanted 0.45",
        "met: `none` over llama.cpp beside 2: 5.00 (5.00-5.00), wanted 3.00",
        f"**not met**: `{DEFAULT_STRATEGY}` over `none` on prose beside 2: 0.90 (0.90-0.90), wanted 0.95",
        f"met: `{DEFAULT_STRATEGY}` over `none` on copy beside 2: 2.60 (2.60-2.60), wanted 2.40",
        "**not met**: tokens per step of right predictions beside 2: 2.00, idle 5.00",
        "| transformers plain | no \\| such place |",
    ],
)
def test_goals_and_failures_are_said_in_a_line_each(text: str, line: str) -> None:
    assert line in text


def test_answers_are_longer_on_faster_models_within_bounds() -> None:
    slow, usual, fast = (Lengths.of(speed) for speed in (1, 300, 10_000))
    assert (slow, fast) == (Lengths(16, 64), Lengths(256, 160))
    assert slow.engines < usual.engines < fast.engines


def test_the_command_in_the_results_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    from benchmarks.busy.__main__ import command, parse

    options = parse(["--quick", "--model", str(tmp_path / "some" / "model")])
    assert command(options) == "python -m benchmarks.busy --venvs DIR --model model --quick"
