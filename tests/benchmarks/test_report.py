"""The pages made of rows, and the prompts that ship: what a reader is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.figures.report import report
from benchmarks.setup import FULL, KINDS, Setup
from parlay.bench.prepare import LOOPS
from parlay.bench.provenance import ROOT, provenance
from parlay.bench.records import OURS, PLAIN, Cell, Row

HEADER = provenance("python -m benchmarks.figures")


def row(part: str, strategy: str, seconds: float, kind: str = "edit", *, engine: str = OURS, error: str = "") -> Row:
    cell = Cell(part=part, engine=engine, model="m", strategy=strategy, workload=kind)
    if error:
        return Row(cell=cell, error=error)
    return Row(
        cell=cell,
        requests=1,
        tokens=30,
        decode_tokens=29,
        decode_seconds=seconds,
        steps=10,
        proposed_by_position=(40,),
        accepted_by_position=(20,),
        same=1,
        of=1,
    )


def test_strategies_have_a_line_for_each_kind_and_the_mean() -> None:
    times = ((PLAIN, 2.0), ("draft-model", 1.0))
    rows = [row("adversary", name, seconds, kind) for kind in ("edit", "code") for name, seconds in times]
    page = report(HEADER, rows)
    assert "| edit | 2.00 (2.00-2.00) | 3.00 | 0.50 | 1/1 | 30 | - |" in page
    assert "| **geometric mean** | **2.00** |" in page


def test_prompts_left_out_are_named_on_the_page() -> None:
    rows = [replace(row("adversary", name, 1.0), note=f"1 of 8 prompts left out: {LOOPS}") for name in (PLAIN, "union")]
    assert f"edit: 1 of 8 prompts left out: {LOOPS}." in report(HEADER, rows)


def test_parts_of_a_step_are_medians_over_rounds() -> None:
    cell = Cell(part="overhead", model="stub 4096", strategy=PLAIN, workload="greedy", concurrency=32)
    names = ("besides", "besides p90", "propose", "verify", "accept", "commit", "observe", "report", "rest", "tokens")
    rows = [
        Row(cell=cell, round=turn, values=dict.fromkeys(names, value)) for turn, value in enumerate((1.0, 2.0, 9.0))
    ]
    page = report(HEADER, rows)
    assert "Vocabulary 4096" in page
    assert "| none | 32 | greedy | 2.000 |" in page


def test_prompts_that_ship_cover_every_kind() -> None:
    setup = Setup(FULL, None, Path("nowhere"))
    for kind in KINDS:
        workload = setup.drawn(kind, 3)
        assert (workload.name, len(workload.items)) == (kind, 3)


def test_committed_results_name_no_folder_of_the_machine() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.*"):
        text = path.read_text(encoding="utf-8")
        assert not any(str(folder) in text for folder in (ROOT, Path.home()))
