"""The benchmarks' commands say what is wrong with a file or a server in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import plots
from benchmarks.options import add_run_flags, command_parser
from benchmarks.plan import kinds
from benchmarks.serving import infill
from benchmarks.strategies import __main__ as strategies


def test_files_and_servers_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    there = tmp_path / "code.py"
    there.write_text("def longer_than_one_line(value):\n    return value + value + value\n" * 40)
    for file, server, said in (
        (tmp_path / "none.py", "one=http://127.0.0.1:9", "No such file"),
        (tmp_path, "one=http://127.0.0.1:9", "Is a directory"),
        (there, "one=http://127.0.0.1:9", "the server one at http://127.0.0.1:9 gives no answer"),
        (there, "one", "the server one at no address gives no answer"),
    ):
        with pytest.raises(SystemExit, match=re.escape(said)) as found:
            infill.main([server, str(file)])
        assert str(found.value).startswith("benchmarks.serving.infill: ")
        assert "\n" not in str(found.value)


def test_tables_and_pictures_are_made_where_the_rows_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match=r"benchmarks\.plan\.kinds: can't read the results .*replay\.jsonl"):
        kinds.main()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"benchmarks\.plots: there is no folder docs/pictures here"):
        plots.main()


def test_a_folder_without_the_recorded_answers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--data", str(tmp_path), "--only", "replay", "--out", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr("sys.argv", ["benchmarks.strategies", *words])
    with pytest.raises(SystemExit, match=r"benchmarks\.strategies: can't read .*\.jsonl.*: No such file or directory"):
        strategies.main()


def test_an_out_that_cannot_be_written_is_one_line_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    parser = command_parser(
        "study", "Measures.\n\nparlay pull a\npython -m benchmarks.study --out FILE\n\n    parlay a\n    parlay b\n"
    )
    add_run_flags(parser)
    assert parser.parse_args(["--out", str(tmp_path / "new" / "rows.jsonl")]).out.parent.is_dir()
    for out, said in ((tmp_path, "it is a folder"), (file / "rows.jsonl", "can't make its folder: ")):
        with pytest.raises(SystemExit):
            parser.parse_args(["--out", str(out)])
        error = capsys.readouterr().err
        assert error.startswith(f"python -m benchmarks.study: --out {out}: {said}")
        assert error.count("\n") == 1
    help_text = parser.format_help()
    assert "\nparlay pull a\npython -m benchmarks.study --out FILE\n" in help_text
    assert "\n    parlay a\n    parlay b\n" in help_text
