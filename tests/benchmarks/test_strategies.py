"""The tables of all strategies: recorded answers, speed, and what the formula says of it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.strategies.replays import PART as REPLAY
from benchmarks.strategies.report import report
from benchmarks.strategies.speed import DRAFT_STEPS, IDEAL
from benchmarks.strategies.speed import PART as SPEED
from parlay.bench.provenance import provenance
from parlay.bench.records import Cell, Row

HEADER = provenance("python -m benchmarks.strategies")
PLAIN = Row(
    cell=Cell(part=SPEED, model="m", strategy="none", workload="edit"),
    requests=1,
    tokens=40,
    decode_tokens=40,
    decode_seconds=4.0,
    steps=40,
    same=1,
    of=1,
    values={IDEAL: 4.0, DRAFT_STEPS: 0.0},
)
LOOKUP = replace(
    PLAIN,
    cell=replace(PLAIN.cell, strategy="prompt-lookup"),
    decode_seconds=2.0,
    steps=10,
    proposed_by_position=(30, 10),
    values={IDEAL: 1.0, DRAFT_STEPS: 10.0},
)


def test_speed_stands_beside_what_the_formula_says() -> None:
    page = report(HEADER, [PLAIN, LOOKUP])
    assert "| `prompt-lookup` | 2.00 (4.0) | 2.00 | 1/1 |" in page
    assert "| `prompt-lookup` | 4.00 | 5.00 | 2.00 | 4.00 | 0.50 (*) |" in page


def test_the_formula_is_held_against_plain_decoding_of_the_same_texts_alone() -> None:
    """A strategy that failed on one kind of text has no ratio of the others to all."""
    slow = replace(PLAIN, cell=replace(PLAIN.cell, workload="prose"), decode_seconds=40.0)
    failed = Row(cell=replace(LOOKUP.cell, workload="prose"), error="out of memory")
    page = report(HEADER, [PLAIN, LOOKUP, slow, failed])
    assert "| `prompt-lookup` | 4.00 | 5.00 | 2.00 | 4.00 | 0.50 (*) |" in page


def test_recorded_answers_have_tokens_per_step_or_say_what_went_wrong() -> None:
    cell = Cell(part=REPLAY, model="recorded answers", strategy="jacobi", workload="code edits")
    rows = [
        Row(cell=cell, tokens=30, steps=10, same=1, of=2, draft_seconds=1e-4),
        Row(cell=replace(cell, workload="LLMA questions"), error="it can't be replayed"),
    ]
    assert "| `jacobi` | 3.00 (text differs) | it can't be replayed | 10 |" in report(HEADER, rows)
