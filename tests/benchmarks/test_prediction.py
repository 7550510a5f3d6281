"""The benchmark of predicted outputs: the page holds every strategy against plain decoding."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serving.prediction import KIND, report
from parlay.bench.provenance import provenance
from parlay.bench.records import Cell, Results, Row


def row(strategy: str, seconds: float, *, same: int = 1) -> Row:
    return Row(
        cell=Cell(model="m", strategy=strategy, workload=KIND),
        requests=1,
        tokens=41,
        decode_tokens=40,
        decode_seconds=seconds,
        steps=10,
        same=same,
        of=1,
        looped=0.0,
    )


def test_lines_hold_ratio_tokens_per_step_and_equal_texts(tmp_path: Path) -> None:
    results = Results(tmp_path / "p.jsonl", provenance("x"))
    results.add([row("none", 4.0), row("prediction", 1.0), row("prompt-lookup", 2.0, same=0)])
    page = report(results)
    assert "| m | `prediction` | 4.00 (4.00-4.00) | 4.1 | 1/1 | 0.00 |" in page
    assert "| m | `prompt-lookup` | 2.00 (2.00-2.00) | 4.1 | 0/1 | 0.00 |" in page
