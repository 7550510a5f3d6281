"""`parlay ngram`, as a user calls it."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from parlay.cli.ngram_texts import tell
from tests.cli.conftest import MINI, NO_MODEL, SNAPSHOTS, Cli

TEXT = "the cat sat on the mat\nthe cat ran to the mat\n" * 3


def test_words_are_counted_scored_and_written(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    text, file = str(tmp_path / "t.txt"), str(tmp_path / "m.ngrams")
    built = cli("ngram", "build", text, "--words", "--order", "3", "-o", file)
    assert (built.code, "36 tokens of 6 texts" in built.out) == (0, True), built.err
    found = json.loads(cli("ngram", "prob", file, text, "--json").out)
    assert found["tokens"] == 42
    assert 1 < found["perplexity"] < 4
    assert len(cli("ngram", "prob", file, text, "--per-token").out.splitlines()) == 43
    written = cli("ngram", "generate", file, "the", "--seed", "1", "--max-tokens", "5").out.split()
    assert written == cli("ngram", "generate", file, "the", "--seed", "1", "--max-tokens", "5").out.split()
    assert set(written) <= set(TEXT.split())
    facts = json.loads(cli("ngram", "info", file, "--json").out)
    assert (facts["order"], facts["words"], facts["checksum"]) == (3, True, "ok")
    assert cli("ngram", "build", text, "--words", "--order", "3", "-o", file + ".arpa").code == 0
    assert cli("ngram", "build", file + ".arpa", "--words", "-o", file).code == 0
    assert json.loads(cli("ngram", "prob", file, text, "--json").out)["perplexity"] == pytest.approx(
        found["perplexity"]
    )
    assert "rewards n-grams of up to" in cli("ngram", "info", text, "--words").out


def test_a_model_of_tokens_drafts_and_the_text_is_that_of_plain_decoding(cli: Cli, tmp_path: Path) -> None:
    asked = ("generate", "Once upon a time there was a", *MINI, "--max-tokens", "30", "--ignore-eos")
    plain = cli(*asked, "--strategy", "none").out
    text, file = tmp_path / "t.txt", str(tmp_path / "m")
    text.write_text(f"Once upon a time there was a{plain}" * 2)
    built = cli("ngram", "build", str(text), *MINI, "-o", file)
    assert (built.code, f"generate {' '.join(MINI)} --strategy ngram-lm:file={file}" in built.out) == (0, True)
    fast = cli(*asked, "--strategy", f"ngram-lm:file={file},policy=fixed")
    assert fast.out == plain
    assert "from ngram-lm" in fast.err
    mixed = cli("ngram", "prob", file, str(text), "--target", "parlay-mini", "--json")
    found = json.loads(mixed.out)
    assert found["perplexity"] <= min(found["target_alone"], found["n-grams_alone"]) * 1.01
    store = str(tmp_path / "s.ds")
    assert cli("datastore", "build", str(text), *MINI, "-o", store).code == 0
    assert json.loads(cli("ngram", "prob", store, str(text), "--json").out)["seen_so"] > 0.9


def test_flags_that_would_do_nothing_are_refused(cli: Cli, tmp_path: Path) -> None:
    text, words, tokens, store = (str(tmp_path / name) for name in ("t.txt", "w", "m", "s"))
    Path(text).write_text(TEXT)
    assert cli("ngram", "build", text, "--words", "-o", words).code == 0
    assert cli("ngram", "build", text, "--words", "-o", f"{words}.arpa").code == 0
    assert cli("ngram", "build", text, *MINI, "-o", tokens).code == 0
    assert cli("datastore", "build", text, *MINI, "-o", store).code == 0
    target = ("--target", NO_MODEL[1])
    for given, named in [
        (["prob", words, text, "--weight", "0"], "--weight"),
        (["prob", words, text, "--window", "512"], "--window"),
        (["prob", words, text, "--tokenizer", "parlay-mini"], "--tokenizer"),
        (["prob", tokens, text, *target, "--per-token"], "--per-token"),
        (["prob", tokens, text, *target, "--tokenizer", "parlay-mini"], "--tokenizer"),
        (["prob", store, text, "--window", "9"], "--window"),
        (["prob", store, text, *target], "--target"),
        (["generate", words, "--tokenizer", "parlay-mini"], "--tokenizer"),
        (["info", words, "--words"], "--words"),
        (["info", tokens, *MINI], "--model"),
        (["info", tokens, "--longest", "8"], "--longest"),
        (["build", f"{words}.arpa", "-o", words, "--order", "3"], "--order"),
        (["build", f"{words}.arpa", "-o", words, "--counts"], "--counts"),
    ]:
        result = cli("ngram", *given)
        assert (result.code, result.err.count("\n"), f"error: {named}" in result.err) == (2, 1, True), given


def test_json_is_read_by_strict_readers(cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line is an object, and what is no number is null; what stupid back-off gives is called no perplexity."""
    text, words, store = (str(tmp_path / name) for name in ("t.txt", "w", "s"))
    Path(text).write_text(TEXT)
    assert cli("ngram", "build", text, "--words", "-o", words, "--smoothing", "stupid-backoff").code == 0
    assert cli("datastore", "build", text, *MINI, "-o", store).code == 0
    lines = cli("ngram", "prob", store, text, "--per-token", "--json").out.splitlines()
    assert {"times", "total", "length", "token"} == json.loads(lines[0]).keys()
    assert json.loads(lines[-1])["tokens"] == len(lines) - 1
    assert "perplexity" not in json.loads(cli("ngram", "prob", words, text, "--json").out)
    tell(Namespace(json=True), "f", {"a b": math.inf, "c": math.nan, "d": 1})
    assert json.loads(capsys.readouterr().out) == {"file": "f", "a_b": None, "c": None, "d": 1}


def test_a_long_text_is_looked_at_in_part(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.cli.ngram_info._MOST", 100)
    (tmp_path / "t.txt").write_text(TEXT)
    result = cli("ngram", "info", str(tmp_path / "t.txt"), "--words", "--longest", "4", "--json")
    assert json.loads(result.out)["tokens"] == 25
    assert "only its first 25 tokens" in result.err
    whole = cli("ngram", "info", str(tmp_path / "t.txt"), "--words", "--longest", "2", "--json")
    assert (json.loads(whole.out)["tokens"], whole.err) == (36, "")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["build", "-", "--words", "-o", "m"], "no text"),
        (["build", "nowhere", "--words", "-o", "m"], "nowhere"),
        (["build", "-", "--words", "-o", "m", "--order", "0"], "--order must be at least 1, got 0"),
        (["build", "-", "--words", "-o", "m", "--prune", "2"], "--prune 2: begin with 0"),
        (["build", "a.arpa", "-o", "m"], "a.arpa"),
        (["build", "-", "--words", "-o", "/dev/null"], "/dev/null is not a regular file"),
        (["prob", "nowhere", "-"], "nowhere"),
        (["generate", "nowhere"], "nowhere"),
        (["info", "-", "--words"], "no text"),
    ],
)
def test_mistakes_are_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("ngram", *words)
    assert result.code in (1, 2)
    assert named in result.err
    assert result.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse lays out its help in another way from 3.13 on")
@pytest.mark.parametrize("action", ["build", "prob", "generate", "info"])
def test_help_is_as_it_was(cli: Cli, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli("ngram", action, "--help").out == (SNAPSHOTS / f"ngram-{action}.txt").read_text()


def test_a_folder_without_text_says_which_files_were_left_out(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xff\xfe\xfd")
    result = cli("ngram", "build", str(folder), "--words", "-o", str(tmp_path / "m"))
    assert result.code == 2
    assert "skipped 1 of 1 files" in result.err
    assert "the corpus holds no text" in result.err
