"""`transformers` beside Parlay's strategies: the same checkpoint and requests, timed by the same stopwatch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parlay.bench.against import AS_IT_COMES, LOOKUP, NAME, Transformers
from parlay.bench.records import OURS, Cell, Results, Row, System
from parlay.bench.runner import Bench, BenchPlan
from parlay.bench.summary import summarise
from parlay.bench.table import HEAD, readme_table
from parlay.llm import LLM
from tests.bench.conftest import LETTERS

PLAN = BenchPlan(
    model="tiny",
    strategies=("prompt-lookup",),
    workloads=(LETTERS,),
    against=(System(NAME, AS_IT_COMES), System(NAME, LOOKUP)),
    rounds=1,
    keep_loops=True,
)


@pytest.fixture(scope="module")
def peer(tiny: LLM, tiny_folder: Path) -> Transformers:
    return Transformers(tiny_folder, tiny.runner.spec.device, tiny.runner.spec.dtype)


def measure(llm: LLM, peer: Transformers, plan: BenchPlan, path: Path) -> list[Row]:
    results = Results(path, {"machine": "m"})
    Bench(llm, plan, results, {NAME: peer}).run()
    return results.rows


def test_its_modes_are_rows_whose_texts_are_compared(tiny: LLM, peer: Transformers, tmp_path: Path) -> None:
    rows = {row.cell.strategy: row for row in measure(tiny, peer, PLAN, tmp_path / "rows.jsonl")}
    assert list(rows) == ["none", "prompt-lookup", AS_IT_COMES, LOOKUP]
    for row in rows.values():
        assert (row.requests, row.same, row.of, row.error, row.tokens) == (3, 3, 3, "", rows["none"].tokens)
        assert len(row.ttft) == 3
        assert row.seconds >= row.decode_seconds > 0
    assert rows[AS_IT_COMES].steps == rows[AS_IT_COMES].tokens


def test_what_it_is_not_measured_at_is_a_row_that_says_so(tiny: LLM, peer: Transformers, tmp_path: Path) -> None:
    plan = replace(PLAN, concurrency=(2,), temperatures=(0.0,))
    errors = {row.cell.strategy: row.error for row in measure(tiny, peer, plan, tmp_path / "rows.jsonl")}
    assert "one request at a time" in errors[AS_IT_COMES]
    assert not errors["none"]


def test_a_gguf_file_is_a_row_that_says_what_to_name_instead(tiny: LLM, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    peer = Transformers(file, tiny.runner.spec.device, tiny.runner.spec.dtype)
    errors = {row.cell.strategy: row.error for row in measure(tiny, peer, PLAN, tmp_path / "rows.jsonl")}
    assert "does not run the blocks of a GGUF file: name a folder" in errors[AS_IT_COMES]
    assert not errors["none"]


def test_the_table_of_the_readme_holds_a_strategy_against_plain_decoding_and_the_fastest_other_mode() -> None:
    def row(strategy: str, turn: int, seconds: float, concurrency: int = 1) -> Row:
        engine = NAME if strategy in (AS_IT_COMES, LOOKUP) else OURS
        return Row(
            cell=Cell(engine=engine, model="m", workload="copy", strategy=strategy, concurrency=concurrency),
            round=turn,
            requests=2,
            tokens=12,
            decode_tokens=10,
            decode_seconds=seconds,
            seconds=seconds,
            steps=6,
            same=2,
            of=2,
        )

    times = {
        "none": (4.0, 6.0, 4.0),
        "prompt-lookup": (1.0, 2.0, 2.0),
        AS_IT_COMES: (8.0, 8.0, 8.0),
        LOOKUP: (4.0, 9.0, 6.0),
    }
    rows = [row(name, turn, seconds) for name, all_of in times.items() for turn, seconds in enumerate(all_of)]
    rows += [row(name, 0, 1.0, concurrency=2) for name in ("none", "prompt-lookup")]  # not compared: left out
    lines = readme_table(summarise(rows)).splitlines()
    assert lines[0] == "| " + " | ".join(HEAD) + " |"
    assert lines[2:] == ["| copy | `prompt-lookup` | 3.00 | 4.0 | 2.00 | 6/6 |"]
