"""The pages made of rows, and the prompts that ship: what a reader is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.figures.parts import COMBINATIONS, at_its_best
from benchmarks.figures.report import report
from benchmarks.setup import FULL, KINDS, Setup
from parlay.bench.against import AS_IT_COMES, NAME
from parlay.bench.prepare import LOOPS
from parlay.bench.provenance import ROOT, provenance
from parlay.bench.records import OURS, PLAIN, Cell, Results, Row
from parlay.llm import DEFAULT_STRATEGY

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


def test_plain_decoding_names_the_default_and_the_combinations_that_failed() -> None:
    rows = [row("plain", PLAIN, 1.0, kind) for kind in ("prose", "code")]
    rows += [row("plain", AS_IT_COMES, seconds, kind, engine=NAME) for kind, seconds in (("prose", 1.0), ("code", 3.0))]
    rows += [row("plain", COMBINATIONS[0], 0.0, engine=NAME, error="RuntimeError: no compiler")]
    page = report(HEADER, rows)
    assert "| transformers plain | 14.5 | 2.00 (2.00-2.00) | 2/2 | default |" in page
    assert f"| {NAME} {COMBINATIONS[0]} |  |  |  | failed: RuntimeError: no compiler |" in page


def test_each_workload_is_held_against_the_fastest_that_transformers_has() -> None:
    rows = [
        row("versus", PLAIN, 3.0),
        row("versus", DEFAULT_STRATEGY, 1.0),
        row("versus", "bf16 sdpa compiled", 4.0, engine=NAME),
        row("versus", "bf16 sdpa prompt lookup", 2.0, engine=NAME),
        row("versus", "bf16 sdpa assisted", 0.0, engine=NAME, error="ValueError: no"),
    ]
    line = next(line for line in report(HEADER, rows).splitlines() if line.startswith("| edit"))
    assert "| 3.00 (3.00-3.00) | 2.00 (2.00-2.00) | 1/1 | 3.00 | bf16 sdpa prompt lookup, same 1/1 |" in line


def test_what_takes_no_static_cache_runs_in_the_fastest_combination_without_one(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl", {})
    with pytest.raises(ValueError, match="no combination of transformers ran"):
        at_its_best(results, "m")
    times = {"fp32 sdpa compiled": 1.0, "bf16 eager plain": 2.0, "fp32 sdpa plain": 3.0}
    results.add([row("plain", name, seconds, engine=NAME) for name, seconds in times.items()])
    best, lookup, assisted = at_its_best(results, "m")
    assert (best, lookup, assisted) == ("fp32 sdpa compiled", "bf16 eager prompt lookup", "bf16 eager assisted")


def test_strategies_have_a_line_for_each_kind_and_the_mean() -> None:
    times = ((PLAIN, 2.0), ("draft-model", 1.0))
    rows = [row("draft", name, seconds, kind) for kind in ("edit", "code") for name, seconds in times]
    page = report(HEADER, rows)
    assert "| edit | 2.00 (2.00-2.00) | 3.00 | 0.50 | 1/1 | 30 | - |" in page
    assert "| **geometric mean** | **2.00** |" in page


def test_prompts_left_out_are_named_on_the_page() -> None:
    rows = [replace(row("lookup", name, 1.0), note=f"1 of 8 prompts left out: {LOOPS}") for name in (PLAIN, "union")]
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
