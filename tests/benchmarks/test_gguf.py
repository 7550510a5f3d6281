"""The benchmark beside llama.cpp: its files are models, its distances are those of their definitions, and its page
shows what was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.gguf import accuracy, bits, loading
from benchmarks.gguf.__main__ import Run, parse
from benchmarks.gguf.files import KINDS, Shape, random_blocks
from benchmarks.gguf.llama import LlamaCpp
from benchmarks.gguf.page import page
from benchmarks.gguf.speed import LLAMA, ROWS, Ours, part_of
from parlay import models
from parlay.bench.forwards import FORWARD, WEIGHTS
from parlay.bench.provenance import provenance
from parlay.bench.records import OURS, Cell, Results, Row
from parlay.system import threads
from parlay.types import Segment

SMALL = Shape(layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, vocab=1024)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_files_of_random_blocks_are_models_whose_numbers_stay_small(kind: Kind, tmp_path: Path) -> None:
    runner = models.load(str(random_blocks(tmp_path, kind, SMALL)), cache_tokens=64)
    runner.open(0, (1,))
    runner.reserve(0, 8)
    logits_NV = runner.forward([Segment(0, (1, 2, 3))]).logits_RV
    assert logits_NV.isfinite().all()
    assert 0 < logits_NV.abs().max() < 1e4
    assert not list(tmp_path.glob("*.part"))


def test_files_that_were_not_asked_for_are_not_made(tmp_path: Path) -> None:
    options = parse(["--llama", "python", "--files", "Q2", "--cache", str(tmp_path)])
    run = Run(options, Results(tmp_path / "rows.jsonl", {}), cast(LlamaCpp, None))
    assert [*run.smollm2(), *run.random()] == []
    assert not list(tmp_path.glob("**/*.gguf"))


def test_forwards_and_prompts_are_timed(tmp_path: Path) -> None:
    before = threads.count()
    engine = Ours(random_blocks(tmp_path, Kind.Q4_0, SMALL))
    try:
        engine.use(1)
        assert engine.rows(4) > 0
        assert engine.prompt() > 0
    finally:
        threads.use(before)


def test_no_logit_depends_on_how_a_text_is_read(tmp_path: Path) -> None:
    rows = list(bits.measure(random_blocks(tmp_path, Kind.Q4_K, SMALL)))
    assert len(rows) == 10
    assert not any(row.values["differing"] for row in rows)
    by_way = {row.cell.strategy: row.tokens for row in rows}
    assert 0 < by_way.pop("reused") < bits.TOKENS
    assert by_way.pop("drafted") == bits.TOKENS
    assert set(by_way.values()) == {bits.TOKENS}


def test_distances_are_those_of_their_definitions() -> None:
    one = np.log(np.array([[[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [1 / 3, 1 / 3, 1 / 3]]], np.float32))
    other = np.log(np.array([[[0.25, 0.5, 0.25], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]], np.float32))
    found = accuracy.distance(one, other + 7, np.array([[2, 0, 1]]))
    assert found["divergence"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2, abs=1e-6)
    assert found["same"] == 0.5
    assert found["perplexity"] == pytest.approx(math.exp(math.log(2) / 2) - 1, abs=1e-6)


def test_the_page_holds_ratios_of_the_same_pass() -> None:
    rows = [
        Row(cell=_cell(engine, f"rows {count}"), round=turn, steps=1, tokens=count, seconds=seconds * (turn + 1))
        for turn in range(3)
        for count in ROWS
        for engine, seconds in ((OURS, 0.002), (LLAMA, 0.008))
    ]
    rows += [Row(cell=_cell(OURS, WEIGHTS), round=turn, seconds=0.001 * (turn + 1)) for turn in range(3)]
    rows.append(
        Row(
            cell=Cell(part=accuracy.PART, engine="llama.cpp", model="m", strategy="Parlay", workload="books"),
            tokens=2048,
            values={"divergence": 0.0031, "same": 0.957, "perplexity": -0.0012},
        )
    )
    for what, seconds in ((loading.LOAD, 0.4), (loading.AGAIN, 0.3), (loading.READ, 0.2), (loading.READ_NEW, 0.25)):
        cell = Cell(part=loading.PART, model="m", strategy=loading.LOAD, workload=what)
        rows.append(Row(cell=cell, seconds=seconds, values={"memory": 1.1}))
    text = page(provenance("here", {"llama_cpp_python": "1.2"}), rows)
    assert "| m | 2 | 4.00 (4.0 / 16.0) | - | 0.25 | 0.25 | 0.25 | 0.25 | 0.25 | 2.00 | 2.00 |" in text
    assert "| m | llama.cpp | Parlay | 0.00310 | 95.7 % | -0.12 % |" in text
    assert "| m | 0.40 | 0.30 | 1.50 | 1.20 | 1.10 | - |" in text
    assert "llama-cpp-python 1.2" in text


def _cell(engine: str, what: str) -> Cell:
    return Cell(part=part_of(2), engine=engine, model="m", strategy=FORWARD, workload=what, context=256)
