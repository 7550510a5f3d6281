"""The report: what is in the files is shown, what is not is named, and what does not belong together is refused."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parlay.bench.records import Cell, Results, Row
from parlay.bench.report import tables
from parlay.bench.report.markdown import Section, Table, page
from parlay.bench.report.sources import gather
from parlay.bench.report.write import write
from parlay.types import ParlayError

HEADER = {
    "machine": {"cpu": "abacus", "cores": 2},
    "versions": {"parlay": "0"},
    "commit": "abc",
    "command": "parlay bench",
}


def row(strategy: str = "none", workload: str = "edit", seconds: float = 1.0, **more: object) -> Row:
    """100 tokens in so many seconds."""
    cell = Cell(model="m", strategy=strategy, workload=workload)
    made = Row(cell=cell, requests=1, tokens=101, decode_tokens=100, decode_seconds=seconds, seconds=seconds, steps=101)
    return replace(made, **more)  # type: ignore[arg-type]


def forward(rows: int, seconds: float) -> Row:
    cell = Cell(model="m", strategy="forward", workload=f"rows {rows}", context=64)
    return Row(cell=cell, steps=1, tokens=rows, seconds=seconds, verify_seconds=seconds)


def at(rows: Row, concurrency: int) -> Row:
    return replace(rows, cell=replace(rows.cell, concurrency=concurrency))


def save(path: Path, rows: list[Row], **header: object) -> Path:
    Results(path, {**HEADER, **header}).add(rows)
    return path


def lines(section: Section) -> list[dict[str, str]]:
    """The lines of all tables, by their heads."""
    return [dict(zip(table.head, line, strict=True)) for table in section.tables for line in table.lines]


FAST = row("fast", seconds=0.25, steps=26, proposed_by_position=(25, 25, 25), accepted_by_position=(25, 25, 24))
EVERYTHING = [
    row(),
    FAST,
    at(row(), 4),
    at(FAST, 4),
    forward(1, 0.01),
    forward(4, 0.012),
    Row(cell=Cell(model="m", strategy="forward", workload="weights"), seconds=0.005, peak_memory_bytes=5_000_000),
]
TITLES = [tables.SPEED, tables.POSITIONS, tables.FORWARDS, tables.CELLS]


# --------------------------------------------------------------------------------------------------- what is computed


def test_a_ratio_is_the_median_of_rounds_in_which_both_ran() -> None:
    rounds = [(0, 1.0, 0.5), (1, 2.0, 0.5), (2, 9.0, 3.0)]
    rows = [
        one
        for turn, slow, fast in rounds
        for one in (row(seconds=slow, round=turn), row("x", "edit", fast, round=turn))
    ]
    rows.append(row("x", seconds=0.001, round=3))  # plain decoding has no such round
    (plain, x) = sorted(lines(tables.by_workload(rows)), key=lambda line: line["strategy"])
    assert plain["edit"].startswith("1.00")
    assert x["edit"] == "3.00 (1.0)"


def test_a_mean_says_over_how_many_workloads_it_is() -> None:
    rows = [row(), row(workload="copy"), row("x", seconds=0.5)]
    assert {line["strategy"]: line["mean"] for line in lines(tables.by_workload(rows))}["x"] == "2.00 (1 of 2)"


def test_texts_that_were_not_timed_have_tokens_per_step_and_no_speed() -> None:
    recorded = [row(decode_seconds=0.0, seconds=0.0), replace(FAST, decode_seconds=0.0, seconds=0.0)]
    assert [line["edit"] for line in lines(tables.steps_alone(recorded))] == ["3.88", "1.00"]
    assert tables.by_workload(recorded).tables == ()


def test_modelled_speeds_stand_apart_and_are_called_so() -> None:
    section = tables.by_workload([row(), row(modelled=True), row("x", seconds=0.1, modelled=True)])
    assert [table.title for table in section.tables] == ["m", "m; modelled, not measured"]


def test_acceptance_is_by_position_where_enough_was_proposed() -> None:
    counted = row("x", proposed_by_position=(100, 50, 3), accepted_by_position=(80, 10))
    (line,) = lines(tables.by_position([counted]))
    assert (line["1"], line["2"], line["3"], line["all"]) == ("0.80", "0.20", "", "0.59")


def test_costs_are_those_of_one_row() -> None:
    (line,) = lines(tables.forwards([forward(1, 0.01), forward(8, 0.015), forward(8, 0.015)]))
    assert (line["context"], line["1"], line["8"]) == ("64", "1.00", "1.50")


def test_the_share_of_bandwidth_is_the_time_of_reading_alone() -> None:
    (line,) = lines(tables.forwards(EVERYTHING))
    assert line["of reading alone"] == "50%"


def test_outputs_of_no_length_and_failures_are_shown() -> None:
    empty = row(workload="silence", tokens=0, decode_tokens=0, steps=0, decode_seconds=0.0)
    failed = Row(cell=Cell(model="m", strategy="x", workload="edit"), error="no <such> file | nowhere")
    rows = [row(), empty, replace(empty, cell=replace(empty.cell, strategy="x")), failed]
    assert {line["silence"] for line in lines(tables.by_workload(rows))} == {"no tokens"}
    assert [line["tokens/s"] for line in lines(tables.every_cell(rows))] == ["100.0", "no tokens", "no tokens"]
    assert [line["why"] for line in lines(tables.failures(rows))] == [failed.error]


# ---------------------------------------------------------------------------------------------------- what is written


def test_the_page_holds_every_section_and_a_plot_that_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written, drawn = write([save(tmp_path / "r.jsonl", EVERYTHING)], tmp_path / "out")
    text = written.read_text(encoding="utf-8")
    for title in TITLES:
        assert f"## {title}" in text
    assert "(speed.svg)" in text
    assert "Not measured" not in text
    svg = drawn.read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert all(link.startswith("#") for link in re.findall(r'(?:src|href)="([^"]+)"', svg))


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = save(tmp_path / "r.jsonl", EVERYTHING[:2])
    first, second = ([file.read_bytes() for file in write([path], tmp_path / name)] for name in "ab")
    assert first == second


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    (written,) = write([save(tmp_path / "r.jsonl", [row()])], tmp_path, plots=False)
    text = written.read_text(encoding="utf-8")
    missing = text.partition("## Not measured")[2]
    for title in (tables.POSITIONS, tables.FORWARDS):
        assert f"- {title}: " in missing
    assert f"## {tables.SPEED}" in text


def test_nothing_of_a_file_becomes_markup() -> None:
    shown = Section("i", "a b", (Table(("x",), (("<script>alert(1)</script> | y",),), title="<u>"),))
    text = page("title", [], [shown])
    assert not re.search(r"<(script|u)>", text)
    assert "\\| y" in text


def test_results_that_do_not_belong_together_are_refused_unless_forced(tmp_path: Path) -> None:
    one = save(tmp_path / "one.jsonl", [row()])
    other = save(tmp_path / "two.jsonl", [FAST], commit="def", machine={"cpu": "slide rule"})
    with pytest.raises(ValueError, match=r"two\.jsonl differs from one\.jsonl in machine, commit: .*--force"):
        gather([one, other])
    (written,) = write([one, other], tmp_path, force=True, plots=False)
    assert "Put together by force" in written.read_text(encoding="utf-8")


def test_results_of_one_machine_and_version_may_measure_different_things(tmp_path: Path) -> None:
    one = save(tmp_path / "one.jsonl", [row()], dtype="float32")
    other = save(tmp_path / "two.jsonl", [FAST], dtype="bfloat16", command="another")
    assert gather([one, other]).differences == ()


def test_rounds_of_the_same_cells_are_refused_where_the_model_ran_otherwise(tmp_path: Path) -> None:
    one = save(tmp_path / "one.jsonl", [row(), FAST], dtype="float32")
    other = save(tmp_path / "two.jsonl", [row(), FAST], dtype="bfloat16")
    with pytest.raises(ValueError, match=r"two\.jsonl differs from one\.jsonl in dtype: "):
        gather([one, other])


def test_no_ratio_is_one_of_two_files(tmp_path: Path) -> None:
    """Rounds of both are numbered alike, but were measured at other times."""
    one = save(tmp_path / "one.jsonl", [row(), row("x", seconds=0.5)])
    other = save(tmp_path / "two.jsonl", [row(seconds=10.0), row("x", seconds=5.0)])
    found = lines(tables.by_workload(gather([one, other]).rows))
    assert {line["strategy"]: line["mean"] for line in found} == {"x": "2.00", "none": "1.00"}


def test_parts_of_one_file_are_not_mixed() -> None:
    """As of forwards and texts with one thread and with two."""

    def one_thread(each: Row) -> Row:
        return replace(each, cell=replace(each.cell, part="1 thread"))

    rows = [row(), row("x", seconds=0.5), forward(1, 0.01)]
    slower = [row(seconds=10.0), row("x", seconds=10.0), forward(1, 0.02)]
    every = [*rows, *map(one_thread, slower)]
    speeds = tables.by_workload(every)
    assert [table.title for table in speeds.tables] == ["m", "1 thread; m"]
    assert [line["mean"] for line in lines(speeds) if line["strategy"] == "x"] == ["2.00", "1.00"]
    assert [line["ms of 1 row"] for line in lines(tables.forwards(every))] == ["10.00", "20.00"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "does not begin with a provenance record"),
        ('{"provenance": {}}\n', "holds no rows"),
        ('{"provenance": {}}\n{"model": 3}\n', "line 2: not a row of results"),
        (
            '{"provenance": {}}\n{"model": "m", "strategy": "s", "workload": "w"}\nnot JSON\n',
            "line 3: not a row of results",
        ),
        (
            '{"provenance": []}\n{"model": "m", "strategy": "s", "workload": "w"}\n',
            "does not begin with a provenance record",
        ),
    ],
)
def test_malformed_files_are_named_with_the_line(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=named):
        gather([path])


def test_files_that_are_missing_or_named_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't read"):
        gather([tmp_path / "none.jsonl"])
    path = save(tmp_path / "r.jsonl", [row()])
    with pytest.raises(ValueError, match="named twice"):
        gather([path, path])


def test_a_missing_matplotlib_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = save(tmp_path / "r.jsonl", [row()])
    with pytest.raises(ParlayError, match=r"pip install 'parlay\[plot\]', or --no-plots"):
        write([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert write([path], tmp_path / "out", plots=False)[0].exists()


def test_headers_that_lack_everything_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Results(path, {"machine": "unknown"}).add([row()])
    assert write([path], tmp_path, plots=False)[0].read_text(encoding="utf-8").startswith("# Parlay")


def test_sections_without_anything_amiss_are_left_out_without_a_word() -> None:
    assert [each.title for each in tables.sections(EVERYTHING)] == TITLES
