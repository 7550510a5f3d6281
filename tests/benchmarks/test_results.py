"""The file of results: what was measured is kept, what differs in origin is kept apart."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures.results import Block, Results, Row, read
from parlay.bench.provenance import provenance

HEADER: dict[str, Any] = {"machine": {"cpu": "a"}, "commit": "1", "command": "x", "date": "today"}
ROW = Row(part="lookup", model="m", kind="edit", system="parlay none", tokens=9, decode_seconds=0.5, same=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "figures.jsonl"


def test_a_second_run_goes_on_after_the_blocks_of_the_first(path: Path) -> None:
    Results(path, HEADER).add([ROW, replace(ROW, system="parlay prompt-lookup", error="it broke")])
    again = Results(path, {**HEADER, "command": "y", "date": "tomorrow"})
    assert again.has(ROW.block)
    assert not again.has(Block("lookup", "m", "edit", 0, 1))
    assert [row.error for row in again.rows] == ["", "it broke"]
    assert again.rows[0] == ROW
    assert again.header == HEADER


def test_a_row_cut_short_by_an_interruption_is_measured_again(path: Path) -> None:
    results = Results(path, HEADER)
    results.add([ROW])
    results.add([replace(ROW, prompt=1)])
    path.write_text(path.read_text()[:-10])
    again = Results(path, HEADER)
    assert [row.prompt for row in again.rows] == [0]
    again.add([replace(ROW, prompt=1)])
    assert [row.prompt for row in read(path)[1]] == [0, 1]


def test_rows_of_another_commit_or_machine_are_refused_by_name(path: Path) -> None:
    Results(path, HEADER).add([ROW])
    with pytest.raises(ValueError, match=r"differs in machine, commit.*--fresh"):
        Results(path, {**HEADER, "machine": {"cpu": "b"}, "commit": "2"})
    assert Results(path, {**HEADER, "commit": "2"}, fresh=True).rows == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "does not begin with a provenance record"),
        ('{"part": "lookup"}\n', "does not begin with a provenance record"),
        ('{"provenance": {}}\n{"part": "a"}\n{"speed": 3}\n', "line 3: no row"),
        ('{"provenance": {}}\nnonsense\n', "line 2: no row"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_provenance_names_the_machine_but_no_folder_or_host() -> None:
    record = provenance("python -m benchmarks.figures --data DIR")
    assert record["versions"]["torch"]
    assert record["machine"]["cpu"]
    assert str(Path.home()) not in str(record)
