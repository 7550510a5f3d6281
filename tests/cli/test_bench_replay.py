"""`parlay bench --replay` and `parlay bench report` from the outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from parlay.bench.forwards import is_forward
from parlay.bench.records import read
from tests.cli.conftest import Cli

ANSWERS = '{"prompt": "Say one two three four.", "output": "one two three four."}\n'

MISTAKES = {
    "no such file": (["--replay", "nowhere.jsonl"], "can't read nowhere.jsonl"),
    "two files of one name": (["--replay", "a/x.jsonl,b/x.jsonl.zst"], "two files of --replay are called x: rename"),
    "no such tokenizer": (["--replay", "x", "--tokenizer", "mistral-common:v9"], "choose one of v1"),
    "unknown strategy": (["--replay", "x", "--strategies", "prompt-lokup"], "did you mean prompt-lookup"),
    "rounds of a replay": (["--replay", "x", "--rounds", "2"], "--rounds has no effect with --replay"),
    "concurrency of a replay": (["--replay", "x", "--concurrency", "2"], "--concurrency has no effect"),
    "a model beside a replay": (["--replay", "x", "--model", "y"], "--model has no effect"),
    "another engine's replay": (["--replay", "x", "--against", "transformers"], "--against has no effect"),
    "sets beside a replay": (["--replay", "x", "--data", "."], "--data has no effect with --replay"),
    "a tokenizer for nothing": (["--tokenizer", "parlay-mini"], "--tokenizer works only with --replay"),
    "prices for nothing": (["--cost-model", "parlay-mini"], "--cost-model works only with --replay"),
    "report of nothing": (["report", "-o", "out"], "RESULTS"),
    "report to nowhere": (["report", "x.jsonl"], "--output"),
    "report of no file": (["report", "nowhere.jsonl", "-o", "out"], "can't read the results nowhere.jsonl"),
}


@pytest.fixture
def _few_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to see that they are timed."""
    monkeypatch.setattr("parlay.bench.forwards.CONTEXTS", (8,))
    monkeypatch.setattr("parlay.bench.forwards.PASSES", 1)


@pytest.mark.parametrize("case", MISTAKES)
def test_wrong_usage_is_one_line(cli: Cli, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words, named = MISTAKES[case]
    result = cli("bench", *words)
    assert (result.code, result.out) == (2, "")
    assert named in result.err
    assert result.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_few_forwards")
def test_answers_are_replayed_once_priced_and_reported(cli: Cli, tmp_path: Path) -> None:
    answers, out = tmp_path / "mine.jsonl", tmp_path / "rows.jsonl"
    answers.write_text(ANSWERS)
    words = ["bench", "--replay", str(answers), "--strategies", "none,prompt-lookup,jacobi", "--out", str(out)]
    result = cli(*words)
    assert result.code == 0, result.err
    assert "jacobi: needs the target's most likely tokens" in result.out
    header, rows = read(out)
    assert header["command"] == "parlay bench --replay mine.jsonl --strategies none,prompt-lookup,jacobi"
    assert [row.cell.strategy for row in rows] == ["none", "prompt-lookup", "jacobi"]
    assert cli(*words).code == 0
    assert read(out)[1] == rows  # nothing was measured again
    answers.write_text(ANSWERS.replace("four", "five"))
    changed = cli(*words)
    assert (changed.code, changed.out) == (2, "")
    assert "holds rows of another workload called mine: give another --out, or --fresh" in changed.err
    answers.write_text(ANSWERS)
    failed = cli(*words[:3], "--strategies", "jacobi", "--out", str(tmp_path / "failed.jsonl"))
    assert (failed.code, "jacobi: needs the target's most likely tokens" in failed.out) == (1, True)

    priced = cli(*words, "--cost-model", "parlay-mini")
    assert "speeds are modelled" in priced.out
    more = read(out)[1][len(rows) :]
    assert any(map(is_forward, more))
    assert [row.modelled for row in more if not is_forward(row)] == [True, True, False]  # the last failed

    again = cli(*words[:-1], str(tmp_path / "other.jsonl"), "--cost-table", str(out))
    assert again.code == 0, again.err
    report = cli("bench", "report", str(out), "-o", str(tmp_path / "report"), "--no-plots")
    assert report.code == 0, report.err
    assert "modelled, not measured" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("_few_forwards")
def test_forwards_are_timed_when_asked_for(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["--workloads", "prose", "--strategies", "none", "--prompts", "1", "--rounds", "1", "--max-tokens", "4"]
    assert cli("bench", "--model", "parlay-mini", *words, "--forwards", "--keep-loops", "--out", str(out)).code == 0
    assert {"rows 1", "rows 32", "weights"} <= {row.cell.workload for row in read(out)[1] if is_forward(row)}
