"""A file of results: what was measured comes back as it was, and what is no row is refused with its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parlay.bench.records import Cell, Results, Row, dump, fingerprint, parse, read

HEADER: dict[str, Any] = {"machine": {"cpu": "a"}, "commit": "1", "command": "x", "date": "today"}
CELL = Cell(model="m", strategy="prompt-lookup", workload="edit", concurrency=8, temperature=1)
ROW = Row(
    cell=CELL,
    round=2,
    requests=2,
    tokens=9,
    decode_tokens=7,
    decode_seconds=0.5,
    ttft=(0.25, 0.125),
    proposed_by_position=(3, 2),
    accepted_by_position=(3, 1),
    accepted_by_source={"prompt-lookup": 4},
    looped=0.0,
    same=2,
    of=2,
    note="text \u2028 of a kind",
)


def test_rows_are_flat_without_defaults_and_come_back_equal(tmp_path: Path) -> None:
    record = dump(ROW)
    assert record["strategy"] == "prompt-lookup"
    assert not {"engine", "context", "error", "joules", "cell"} & record.keys()
    assert parse(json.loads(json.dumps(record))) == ROW
    Results(tmp_path / "rows.jsonl", HEADER).add([ROW])
    assert read(tmp_path / "rows.jsonl") == (HEADER, [ROW])


def test_a_run_goes_on_where_the_last_one_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    Results(path, HEADER).add([ROW, replace(ROW, round=3)])
    path.write_text(path.read_text(encoding="utf-8")[:-10], encoding="utf-8")
    assert read(path)[1] == [ROW]
    again = Results(path, {**HEADER, "command": "y", "date": "tomorrow"})
    again.add([replace(ROW, round=4)])
    assert [row.round for row in again.of(CELL)] == [2, 4]
    assert again.of(replace(CELL, context=4096)) == ()
    assert [row.round for row in read(path)[1]] == [2, 4]


def test_rows_of_other_texts_of_the_same_name_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    path, texts = tmp_path / "rows.jsonl", {"edit": fingerprint(["a"])}
    Results(path, HEADER, texts=texts).add([ROW])
    assert Results(path, HEADER, texts={**texts, "prose": fingerprint(["b"])}).rows[0].texts == texts["edit"]
    with pytest.raises(ValueError, match=r"holds rows of another workload called edit: give another --out, or --fresh"):
        Results(path, HEADER, texts={"edit": fingerprint(["b"])})
    assert not Results(path, HEADER, texts={"edit": fingerprint(["b"])}, fresh=True).rows


def test_a_line_that_was_cut_within_a_letter_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Results(path, HEADER).add([ROW, replace(ROW, note="naïve")])
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index("ï".encode()) + 1])
    assert read(path)[1] == [ROW]
    Results(path, HEADER).add([replace(ROW, round=4)])
    assert [row.round for row in read(path)[1]] == [2, 4]


def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    results = Results(path, HEADER)
    results.add([ROW])
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=r"can't write the results .*rows.jsonl: Is a directory"):
        results.add([ROW])
    with pytest.raises(ValueError, match=r"can't read the results .*rows.jsonl: Is a directory$"):
        Results(path, HEADER)


@pytest.mark.parametrize("header", ["null", "[1]", '"x"', "[" * 100_000])
def test_a_header_of_another_kind_is_no_provenance(tmp_path: Path, header: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"provenance": {header}}}\n')
    with pytest.raises(ValueError, match="does not begin with a provenance record"):
        Results(path, HEADER)


def test_rows_of_another_machine_are_refused_by_name_and_stay_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Results(path, HEADER).add([ROW])
    with pytest.raises(ValueError, match=r"differs in machine, commit.*--fresh"):
        Results(path, {**HEADER, "machine": {"cpu": "b"}, "commit": "2"})
    assert read(path)[1] == [ROW]
    assert Results(path, {**HEADER, "commit": "2"}, fresh=True).rows == []


GOOD = '{"model": "m", "strategy": "none", "workload": "edit"'


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        "{}",
        '{"model": "m", "strategy": "none"}',
        GOOD + ', "speed": 3}',
        GOOD + ', "tokens": "9"}',
        GOOD + ', "tokens": true}',
        GOOD + ', "ttft": [0.1, "soon"]}',
        GOOD + ', "accepted_by_source": {"a": "b"}}',
    ],
)
def test_what_is_no_row_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"provenance": {{}}}}\n{GOOD}}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 3: not a row of results"):
        read(path)


def test_a_row_without_any_output_has_no_rates_and_no_fault() -> None:
    empty = Row(cell=CELL, requests=1)
    assert (empty.tokens_per_second, empty.tokens_per_step, empty.acceptance_rate) == (0.0, 0.0, 0.0)
