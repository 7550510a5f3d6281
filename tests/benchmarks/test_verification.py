"""The table of v(rows): ratios are medians over passes, each to the one row of the same pass."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.verification import BF16, INT8, ONE, ROWS, against_floor, by_rows, grouped, longer
from parlay.bench.forwards import FORWARD
from parlay.bench.records import Cell, Row


def row(weights: str, count: int, turn: int, seconds: float) -> Row:
    """One forward of so many rows; of none is the reading."""
    cell = Cell(model=weights, strategy=FORWARD, workload=str(count), context=256)
    return Row(cell=cell, round=turn, steps=int(count > 0), tokens=count, seconds=seconds)


def test_a_ratio_is_the_median_over_passes_of_the_ratio_to_one_row() -> None:
    passes = (1.0, 2.0, 10.0)
    rows = [row(BF16, count, turn, one * (1 + count / 16)) for turn, one in enumerate(passes) for count in ROWS]
    (line,) = by_rows(grouped(rows))
    base = 1 + 1 / 16
    assert line == (BF16, "256", f"{2000 * base:.1f}", *(f"{(1 + n / 16) / base:.2f}" for n in ROWS[1:]))


def test_each_kind_of_weights_meets_its_own_reading_and_bfloat16_on_as_many_threads() -> None:
    seconds = {BF16: (4.0, 5.0), INT8: (2.0, 2.5), BF16 + ONE: (8.0, 8.0), INT8 + ONE: (4.0, 6.0)}
    rows = [row(name, count, 0, each) for name, both in seconds.items() for count, each in enumerate(both)]
    assert list(against_floor(grouped(rows))) == [
        (BF16, "5000.00", "1.25", "1.00"),
        (INT8, "2500.00", "1.25", "2.00"),
        (BF16 + ONE, "8000.00", "1.00", "1.00"),
        (INT8 + ONE, "6000.00", "1.50", "1.33"),
    ]


def test_a_longer_context_changes_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8, "hidden_size": 4}))
    (folder / "model.safetensors").write_bytes(b"weights")
    made = longer(folder, tmp_path / "made", 99)
    assert json.loads((made / "config.json").read_text()) == {"max_position_embeddings": 99, "hidden_size": 4}
    assert (made / "model.safetensors").read_bytes() == b"weights"
