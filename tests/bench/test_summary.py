"""Medians with their spread, ratios to plain decoding of the same round, and a table that leaves nothing unsaid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parlay.bench.records import Cell, Row
from parlay.bench.summary import Spread, geometric_means, summarise
from parlay.bench.table import table

PLAIN = Cell(model="m", strategy="none", workload="edit")
FAST = replace(PLAIN, strategy="prompt-lookup")


def row(cell: Cell, number: int, seconds: float, **more: float) -> Row:
    base = Row(
        cell=cell,
        round=number,
        requests=2,
        tokens=110,
        decode_tokens=100,
        decode_seconds=seconds,
        seconds=seconds + 1,
        ttft=(0.5, 0.7),
        steps=110,
        same=2,
        of=2,
        verify_seconds=0.75,
        overhead_seconds=0.25,
    )
    return replace(base, **more)  # type: ignore[arg-type]


ROWS = [
    row(PLAIN, 0, 10.0),
    row(FAST, 0, 5.0, steps=55),
    row(PLAIN, 1, 40.0),
    row(FAST, 1, 10.0, steps=55),
    row(PLAIN, 2, 10.0),
    row(FAST, 2, 10.0, steps=55, same=1),
    row(FAST, 3, 0.001, steps=55),
]


def test_ratios_are_taken_within_rounds_and_rounds_without_plain_decoding_count_for_none() -> None:
    plain, fast = summarise(ROWS)
    assert plain.ratio == Spread(1.0, 1.0, 1.0)
    assert fast.ratio == Spread(2.0, 1.0, 4.0, pytest.approx(1.858 / 3**0.5, abs=0.001))
    assert fast.speed is not None
    assert fast.speed.low == 10.0
    assert fast.tokens_per_step == 2.0
    assert fast.shares == (0.0, 0.75, 0.25)
    assert replace(fast, rows=tuple(replace(row, verify_seconds=0.0) for row in fast.rows)).shares is None  # a replay
    assert fast.same == (7, 8)
    assert geometric_means([plain, fast]) == {"prompt-lookup": (pytest.approx(2.0), 1)}
    assert plain.ttft == pytest.approx(0.6)


def test_what_an_hour_costs_becomes_tokens_per_unit() -> None:
    (plain,) = summarise([row(PLAIN, 0, 10.0)])
    assert plain.tokens_per_unit(2.0) == pytest.approx(3600 * 110 / 11 / 2)
    assert "tok/unit" in table([plain], 2.0)
    assert "tok/unit" not in table([plain])


def test_errors_empty_rounds_and_zero_length_outputs_keep_their_line() -> None:
    broken = Row(cell=replace(FAST, strategy="union"), error="no draft model: name one")
    silent = Row(cell=FAST, requests=2, same=2, of=2)
    nothing = Row(cell=replace(PLAIN, workload="prose"), note="8 of 8 prompts left out: loops")
    found = summarise([ROWS[0], silent, broken, nothing])
    assert [each.ratio is None for each in found] == [False, True, True, True]
    text = table(found)
    assert "union on edit: no draft model: name one" in text
    assert "prose: 8 of 8 prompts left out: loops" in text
    assert len(text.split("\n\n")[0].split("\n")) == 5


def test_what_is_true_of_every_workload_is_said_once() -> None:
    cells = [replace(FAST, workload=name) for name in ("edit", "copy")]
    text = table(summarise([Row(cell=cell, round=turn, error="it broke") for cell in cells for turn in (0, 1)]))
    assert text.count("it broke") == 1
    assert "prompt-lookup: it broke" in text


def test_only_what_differs_has_a_column() -> None:
    cells = [replace(PLAIN, concurrency=concurrency) for concurrency in (1, 8)]
    head = table(summarise([row(cell, 0, 1.0) for cell in cells])).split("\n")[0]
    assert head.split()[:3] == ["workload", "requests", "strategy"]
    assert "context" not in head
    wanted = [replace(PLAIN, concurrency=8)]
    assert [each.cell for each in summarise([row(cell, 0, 1.0) for cell in cells], wanted)] == wanted


def test_an_interval_is_not_of_prompts_that_are_mixed_up() -> None:
    """Texts differ, and in each another prompt came all at once: nobody knows whose times these are."""
    times = {"requests": 3, "of": 3, "tokens": 30, "decode_tokens": 27, "decode_seconds": 1.0}
    base = Row(cell=PLAIN, itl=(0.1, 0.2), same=3, **times)  # type: ignore[arg-type]
    same = Row(cell=FAST, itl=(0.05, 0.1), same=3, **times)  # type: ignore[arg-type]
    (_, known) = summarise([base, same])
    assert known.interval is not None
    assert known.interval.mean == pytest.approx(2.0)
    (_, unknown) = summarise([base, replace(same, same=2)])
    assert unknown.interval is None
    assert unknown.ratio is not None


def test_an_interval_of_two_prompts_that_differ_does_not_fill_the_line() -> None:
    """Student's t of one degree of freedom gives bounds of many digits, which say no more than that two are too few."""
    times = {"requests": 2, "of": 2, "same": 2, "tokens": 20, "decode_tokens": 18, "decode_seconds": 1.0}
    base = Row(cell=PLAIN, itl=(0.1, 0.2), **times)  # type: ignore[arg-type]
    assert "0.00-99+" in table(summarise([base, Row(cell=FAST, itl=(0.01, 0.2), **times)]))  # type: ignore[arg-type]
    assert "2.00-2.00" in table(summarise([base, Row(cell=FAST, itl=(0.05, 0.1), **times)]))  # type: ignore[arg-type]


def test_a_conversation_counts_once_however_many_turns_it_has() -> None:
    """Its turns are alike, so they say less about other conversations than as many prompts do."""
    times = {"requests": 5, "tokens": 30, "decode_tokens": 27, "decode_seconds": 1.0, "same": 5, "of": 5}
    rows = [
        Row(cell=cell, round=turn, itl=itl, talks=(0, 1, 2, 0, 1), **times)  # type: ignore[arg-type]
        for turn in (0, 1)
        for cell, itl in ((PLAIN, (0.2,) * 5), (FAST, (0.1, 0.05, 0.2, 0.1, 0.05)))
    ]
    apart = [replace(row, itl=row.itl[:3], talks=(), requests=3, same=3, of=3) for row in rows]
    (_, talks), (_, prompts) = summarise(rows), summarise(apart)
    assert talks.interval == prompts.interval
    assert talks.interval is not None
    assert talks.interval.count == 3
