"""`parlay bench`: a table, a file that a second run goes on with, and mistakes that are named before a model loads."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from parlay.bench.records import Results, read
from parlay.bench.runner import Bench, BenchSetting
from parlay.cli import Terminated
from tests.cli.conftest import NO_MODEL, Cli

MISTAKES = {
    "unknown workload": (["--workloads", "edits"], "no workload 'edits'"),
    "published set without a folder": (
        ["--workloads", "humaneval"],
        "needs --data DIR, a folder",
    ),
    "folder without the set": (["--preset", "spec-bench", "--data", "."], "needs spec-bench/question.jsonl"),
    "unknown strategy": (["--strategies", "none,prompt-lokup"], "did you mean prompt-lookup"),
    "effort for nobody": (["--effort", "low", "--strategies", "none,prompt-lookup"], "none, prompt-lookup do not"),
    "unknown parameter": (["--strategies", "prompt-lookup:k=3,gramm=2"], "gramm"),
    "unknown preset": (["--preset", "huge"], "quick, standard, readme"),
    "no rounds": (["--rounds", "0"], "at least 1"),
    "no number": (["--concurrency", "1,many"], "'many'"),
    "temperature below 0": (["--temperature", "-1"], "at least 0"),
    "context below 0": (["--context", "-5"], "at least 0"),
    "several at once": (["--against", "transformers", "--concurrency", "2"], "include 1 in --concurrency"),
    "sampled": (["--preset", "readme", "--temperature", "1"], "0 in --temperature"),
    "other weights": (
        ["--against", "transformers", "--quantize", "int8"],
        "--against transformers can't be used with --quantize",
    ),
    "minutes without prompts": (["--minutes", "2"], "--minutes works only with files of prompts"),
    "prompts and workloads": (["x.txt", "--workloads", "edit"], "--workloads can't be used with files of prompts"),
    "prompts together": (
        ["x.txt", "--concurrency", "4"],
        "--concurrency and --context can't be used with files of prompts",
    ),
    "results below a file": (
        ["x.txt", "--out", f"{__file__}/rows"],
        f"can't write {__file__}/rows: {__file__} is not a",
    ),
    "a folder for results": (["--out", "."], ". is a folder: name a file to write"),
    "prompts that are not there": (["x.txt"], "can't read x.txt"),
    "a model for prompts": (["llama.gguf"], "to measure a model, write --model llama.gguf"),
    "report of nothing": (["report", "-o", "x"], "RESULTS or --output is missing"),
    "report without the word": (["--force"], "--force works only with parlay bench report"),
    "loops of prompts": (["x.txt", "--keep-loops"], "--keep-loops can't be used with files of prompts"),
    "forwards of prompts": (["x.txt", "--forwards"], "--forwards can't be used with files of prompts"),
    "prices of prompts": (["x.txt", "--cost-table", "y"], "--cost-table can't be used with files of prompts"),
    "no minutes": (["x.txt", "--minutes", "0"], "--minutes must be above 0, got 0"),
    "a model of a report": (["report", "x", "-o", "y"], "--model has no effect with parlay bench report"),
    "no workload": (["--workloads", ""], "a workload has no name"),
    "a workload too many": (["--workloads", "edit,"], "a workload has no name"),
    "no strategy": (["--strategies", ","], "no strategy is named"),
    "too many at once": (
        ["--concurrency", "1,100000"],
        "--concurrency must be a whole number of at least 1 and at most 512, got '100000'",
    ),
    "free of charge": (["--price-per-hour", "0"], "above 0"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_wrong_usage_is_one_line(cli: Cli, case: str) -> None:
    words, named = MISTAKES[case]
    result = cli("bench", *words, *NO_MODEL)
    assert (result.code, result.out) == (2, "")
    assert named in result.err
    assert result.err.count("\n") == 1


def test_a_malformed_workload_is_named_with_its_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt"\n')
    result = cli("bench", "--workloads", str(path), *NO_MODEL)
    assert result.code == 2
    assert f"{path}, line 2: not JSON" in result.err


def test_it_measures_prints_and_goes_on(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = tmp_path / "mine.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text(json.dumps({"prompt": "def add(a, b):\n    return a", "max_tokens": 6}))
    words = ["bench", "--model", "parlay-mini", "--workloads", f"{prompts},calls", "--out", str(out)]
    words += ["--dtype", "float32", "--keep-loops"]
    words += ["--strategies", "prompt-lookup:k=4,policy=fixed,suffix-decoding", "--prompts", "1", "--rounds", "1"]
    result = cli(*words, "--max-tokens", "6", "--price-per-hour", "0.5")
    assert result.code == 0, result.err
    head, *lines = result.out.split("\n\n")[0].split("\n")
    assert head.split()[:2] == ["workload", "strategy"]
    assert [line.split()[:2] for line in lines] == [
        [name, strategy]
        for name in ("mine", "calls")
        for strategy in ("none", "prompt-lookup:k=4,policy=fixed", "suffix-decoding")
    ]
    assert all("1/1" in line for line in lines)
    header, rows = read(out)
    assert header["dtype"] == "float32"
    assert str(tmp_path) not in json.dumps(header)
    assert "mine.jsonl,calls" in header["command"]

    again = cli(*words, "--max-tokens", "6")
    assert again.code == 0
    assert read(out)[1] == rows
    refused = cli(*words, "--max-tokens", "5")
    assert (refused.code, refused.out) == (2, "")
    assert "differs in settings" in refused.err
    assert "differs in kernels, options:" in cli(*words, "--max-tokens", "6", "--kv-cache-dtype", "q8_0").err

    def broken(bench: Bench, tell: object) -> None:
        Results(out, header).add([replace(rows[0], requests=1, same=0, of=1)])
        raise Terminated(signal.SIGTERM)

    monkeypatch.setattr(Bench, "run", broken)
    stopped = cli(*words, "--max-tokens", "6")
    assert stopped.code == 143, "after SIGTERM, as of other commands"
    assert "repeat the same command to continue" in stopped.err
    monkeypatch.undo()
    liar = cli(*words, "--max-tokens", "6")
    assert liar.code == 1
    assert "gave another text than plain decoding" in liar.err


def test_prompts_of_ones_own_end_in_a_sentence_on_what_to_take(cli: Cli, tmp_path: Path) -> None:
    """The same from a text, JSON lines and a JSON list, and in the older spelling."""
    texts = ["The cat and the dog, the cat and the bird, the cat", "One two three one two three one"]
    files = {
        "a.txt": "\n\n".join(texts),
        "b.jsonl": "\n".join(json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts),
        "c.json": json.dumps(texts),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    amounts = ("--max-tokens", "16", "--rounds", "1", "--strategies", "none,prompt-lookup", "--model", "parlay-mini")
    asked = None
    for name in files:
        found = json.loads(cli("bench", str(tmp_path / name), *amounts, "--json").out)
        (only,) = found["strategies"]
        assert (only["strategy"], only["same"]) == ("prompt-lookup", only["of"])
        asked = asked or only["of"]
        assert only["of"] == asked > 0
    told = cli("bench", str(tmp_path / "a.txt"), *amounts)
    assert told.code == 0
    assert "prompts: each takes about" in told.err
    last = told.out.rstrip().splitlines()[-1]
    assert re.fullmatch(
        r"Too few prompts for a recommendation: ([12]) of 5 could be timed, so give [34] more\. "
        "Until then remove --strategy: the default drafts only where it pays\\.",
        last,
    )
    plain = cli("bench", str(tmp_path / "a.txt"), "--strategies", "none", "--model", "parlay-mini")
    assert (plain.code, plain.out) == (2, "")
    assert "plain decoding is always measured too" in plain.err
    old = cli("drafters", "recommend", "--prompts", str(tmp_path / "a.txt"), *amounts)
    assert "this is parlay bench" in old.err
    assert old.out.split()[:2] == told.out.split()[:2] == ["strategy", "tokens/s"]


def test_a_race_that_stopped_before_it_tried_a_strategy_advises_the_default(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only strategies that failed speak for plain decoding; those that were not tried do not."""
    timed = Bench.run_setting
    calls = iter(range(9))

    def stopped(self: Bench, setting: BenchSetting) -> None:
        if next(calls):  # after plain decoding of the first prompt
            raise KeyboardInterrupt
        timed(self, setting)

    monkeypatch.setattr(Bench, "run_setting", stopped)
    (tmp_path / "p.txt").write_text(
        "The cat and the dog, the cat and the bird, the cat\nOne two three one two three one"
    )
    told = cli("bench", str(tmp_path / "p.txt"), "--max-tokens", "16", "--model", "parlay-mini")
    assert told.code == 0
    assert told.out.rstrip().endswith(
        "0 of 5 could be timed, so give more time (--minutes). "
        "Until then remove --strategy: the default drafts only where it pays."
    )
