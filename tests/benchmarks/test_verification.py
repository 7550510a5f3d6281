"""The table of v(rows): ratios are medians over passes, each to the one row of the same pass."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.verification import ROWS, lines, longer
from parlay.bench.forwards import FORWARD
from parlay.bench.records import Cell, Row


def test_a_ratio_is_the_median_over_passes_of_the_ratio_to_one_row() -> None:
    def row(count: int, turn: int, seconds: float) -> Row:
        cell = Cell(model="bfloat16", strategy=FORWARD, workload=str(count), context=256)
        return Row(cell=cell, round=turn, steps=1, tokens=count, seconds=seconds)

    passes = (1.0, 2.0, 10.0)
    rows = [row(count, turn, one * (1 + count / 16)) for turn, one in enumerate(passes) for count in ROWS]
    (line,) = lines(rows)
    base = 1 + 1 / 16
    assert line == ("bfloat16", "256", f"{2000 * base:.1f}", *(f"{(1 + n / 16) / base:.2f}" for n in ROWS[1:]))


def test_a_longer_context_changes_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8, "hidden_size": 4}))
    (folder / "model.safetensors").write_bytes(b"weights")
    made = longer(folder, tmp_path / "made", 99)
    assert json.loads((made / "config.json").read_text()) == {"max_position_embeddings": 99, "hidden_size": 4}
    assert (made / "model.safetensors").read_bytes() == b"weights"
