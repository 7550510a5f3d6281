"""The benchmark of `parlay plan`: it runs, goes on where it stopped, and its page says what was reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan import files
from benchmarks.plan.__main__ import main
from benchmarks.plan.cells import BUDGETS, CELLS, HELD_OUT, TARGETS
from benchmarks.plan.decode import errors
from benchmarks.plan.kinds import rates
from benchmarks.plan.report import report
from parlay.bench.plan.kinds import kind_rates
from parlay.bench.provenance import provenance
from parlay.bench.records import Cell, Row, read
from parlay.cost.calibrate import SHAPES

HEADER = provenance("x")


def test_a_quick_run_measures_everything_and_is_not_repeated(tmp_path: Path) -> None:
    out = tmp_path / "plan.jsonl"
    main(["--quick", "--threads", "1", "--dtype", "float32", "--out", str(out)])
    before = out.read_text()
    _, rows = read(out)
    assert {row.cell.workload.split(",")[0] for row in rows if row.cell.part == "cells"} == set(TARGETS)
    assert sum(row.cell.part == "cells" for row in rows) == len(CELLS) * len(BUDGETS)
    assert {row.cell.model for row in rows if row.cell.part == "forwards"} == set(HELD_OUT)
    assert all(row.same for row in rows if row.cell.part == "cells")
    page = out.with_suffix(".md").read_text()
    assert "Median error" in page
    assert "Right in" in page
    calibration = out.with_suffix(".calibration.json").read_text()
    main(["--quick", "--threads", "1", "--dtype", "float32", "--out", str(out)])
    assert (out.read_text(), out.with_suffix(".calibration.json").read_text()) == (before, calibration)


def test_ten_cells_are_declared_and_no_held_out_shape_is_calibrated_on() -> None:
    assert len({cell.name for cell in CELLS}) == 10
    assert not set(HELD_OUT.values()) & set(SHAPES)
    assert max(shape.parameters for shape in HELD_OUT.values()) <= 100e6


@pytest.mark.parametrize("chance", [0.05, 0.2, 0.6, 0.85, 0.95])
@pytest.mark.parametrize("nodes", [4, 16])
def test_imposed_errors_give_the_tokens_per_step_of_the_formula(chance: float, nodes: int) -> None:
    """Few tokens already do, within a tenth."""
    tokens = 96
    right = errors(chance, tokens)
    done = steps = 0
    while done < tokens:
        accepted = 0
        while accepted < nodes and right[done + accepted]:
            accepted += 1
        done += accepted + 1
        steps += 1
        right += errors(chance, tokens) if len(right) < done + nodes + 1 else []
    assert done / steps == pytest.approx((1 - chance ** (nodes + 1)) / (1 - chance), rel=0.1)


def cell(number: int, fastest: str, chosen: str) -> list[Row]:
    return [
        Row(
            cell=Cell(part="cells", model="m", strategy=name, workload=f"cell {number}"),
            decode_tokens=20 if name == fastest else 10,
            decode_seconds=1.0,
            values={"predicted": 2.0 if name == chosen else 1.0},
        )
        for name in BUDGETS
    ]


def test_the_page_counts_right_choices_and_the_best_constant_guess() -> None:
    names = list(BUDGETS)
    fastest = [names[number % 3] for number in range(10)]  # none, the first, in four
    rows = [row for number, name in enumerate(fastest) for row in cell(number, name, name if number else names[1])]
    page = report(HEADER, rows)
    assert "Right in 9 of 10 cells, the best constant guess (`none`) in 4; plain decoding is fastest in 4." in page
    assert ": met." in page
    wrong = [row for number, name in enumerate(fastest) for row in cell(number, name, names[3])]
    assert ": missed." in report(HEADER, wrong)


def test_the_page_counts_errors_of_forwards() -> None:
    rows = [
        Row(
            cell=Cell(part="forwards", model="7 M", strategy="forward", workload=f"rows {rows}", context=256),
            values={"rows": rows, "context": 256, "measured": 1.0, "predicted": predicted},
        )
        for rows, predicted in ((1, 1.05), (2, 0.9), (4, 1.5))
    ]
    assert "Median error 10.0% over 3 forwards (goal: under 20%, met)" in report(HEADER, rows)


def test_the_table_by_kind_of_work_is_made_from_committed_rows() -> None:
    """So every figure of `parlay plan` that was measured elsewhere can be found again."""
    assert tuple(rates()) == kind_rates()
    assert {each.kind for each in kind_rates()} > {"open chat", "code", "edits of code", "maths"}


def test_the_page_of_files_counts_predictions_within_a_fifth_of_the_median() -> None:
    def timed(rows: int, seconds: float) -> Row:
        kept = Cell(model="a", strategy="forward", workload=f"rows {rows}", context=128)
        return Row(cell=kept, steps=1, tokens=rows, seconds=seconds, values={"predicted": 0.01})

    no_room = Row(cell=Cell(model="a", strategy="forward", workload="rows 16", context=8192), note="no room")
    page = files.report(HEADER, [*(timed(1, 0.011) for _ in range(2)), timed(1, 9.0), timed(2, 0.02), no_room])
    assert "1 of 2 predictions are within 20% of the measurement (goal: all), the median error is 29.5%" in page
    assert "| a | 128 | 10.0 / 11.0 | 10.0 / 20.0 |" in page
