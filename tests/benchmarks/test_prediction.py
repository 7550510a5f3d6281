"""The benchmark of predicted outputs: which text is the prediction, and what the page says."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.figures.results import Results, Row
from benchmarks.serving.prediction import EditMaker, line, report
from parlay.train.edits import Edit
from parlay.train.tasks import Sources

HEADER = {
    "machine": {"cpu": "C", "cores": 2, "capability": "AVX512", "memory_gib": 8, "system": "Linux"},
    "versions": {"torch": "2"},
    "environment": {},
    "threads": 2,
    "commit": "c",
    "date": "d",
    "command": "x",
}


def row(system: str, kind: str, seconds: float, *, same: bool = True, turn: int = 0) -> Row:
    return Row(
        part="prediction", model="m", kind=kind, round=turn, system=system, tokens=41, decode_tokens=40,
        decode_seconds=seconds, steps=10, same=same, looped=0.0,
    )  # fmt: skip


ROWS = [
    row("none", "rename", 4.0), row("prediction", "rename", 1.0), row("prompt-lookup", "rename", 2.0),
    row("none", "fix a typo", 4.0), row("prediction", "fix a typo", 0.5, same=False),
]  # fmt: skip


def test_the_prediction_is_the_text_before_the_edit() -> None:
    maker = EditMaker(Sources({}, [], []), heldout=True)
    task = maker.edit("rename", "code", Edit("a", "b", "a = 1", "b = 1"), random.Random(0), ["{old} to {new}"])
    assert task is not None
    assert maker.before == {task.prompt: "a = 1"}
    assert task.answer == "b = 1"
    assert maker.edit("rename", "code", None, random.Random(0), ["x"]) is None


def test_lines_hold_ratio_tokens_per_step_and_equal_texts() -> None:
    assert line(ROWS, "prediction", "rename") == ["`prediction`", "rename", "4.00 (4.00-4.00)", "4.1", "1/1", "0.00"]
    assert line(ROWS, "prediction", "")[2:5] == ["5.33 (5.33-5.33)", "4.1", "1/2"]


def test_the_page_has_a_table_for_each_model(tmp_path: Path) -> None:
    results = Results(tmp_path / "p.jsonl", HEADER)
    results.add(ROWS)
    page = report(results)
    assert "## m" in page
    assert page.count("| `prediction` |") == 3
