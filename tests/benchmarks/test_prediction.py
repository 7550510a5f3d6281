"""The benchmark of predicted outputs: the page holds every strategy against plain decoding."""

from __future__ import annotations

from pathlib import Path

from benchmarks.serving.prediction import ARMS, BARE, KIND, report
from parlay.bench.provenance import provenance
from parlay.bench.records import Cell, Results, Row
from parlay.strategies.entry import DEFAULT_STRATEGY


def row(strategy: str, seconds: float, workload: str = KIND, *, same: int = 1) -> Row:
    return Row(
        cell=Cell(model="m", strategy=strategy, workload=workload),
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
    results.add([row("none", 4.0), row("auto", 2.5), row("prediction", 1.0)])
    results.add([row("none", 6.0, BARE), row("auto", 3.0, BARE), row("prompt-lookup", 2.0, BARE, same=0)])
    page = report(results)
    assert "| m | with predictions | `auto` | 1.60 (1.60-1.60) | 4.1 | 1/1 | 0.00 |" in page
    assert "| m | with predictions | `prediction` | 4.00 (4.00-4.00) | 4.1 | 1/1 | 0.00 |" in page
    assert "| m | without predictions | `auto` | 2.00 (2.00-2.00) | 4.1 | 1/1 | 0.00 |" in page
    assert "| m | without predictions | `prompt-lookup` | 3.00 (3.00-3.00) | 4.1 | 0/1 | 0.00 |" in page


def test_the_default_is_measured_with_predictions_and_without() -> None:
    """It drafts from them by itself, so the difference is what a prediction is worth."""
    assert all(DEFAULT_STRATEGY in arms for arms in ARMS.values())
    assert set(ARMS) == {KIND, BARE}
