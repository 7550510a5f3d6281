"""The tasks on which models with canvases are measured have one right answer, and a row says how many were given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.canvases import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["canvases", *arguments])
    main()


def test_questions_have_their_answers_and_none_is_asked_that_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "tasks", str(tmp_path), "--count", "80", "--held", "40")
    train, held = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held")
    )
    assert (len(train), len(held)) == (80, 40)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held}
    for row in train + held:
        kind, letters = row["prompt"].removesuffix(" =").split(": ")
        answer, asked = row["answer"].split(), letters.split()
        if kind == "replace":
            assert [letter for letter in answer if letter != "m"] == [each for each in asked if each != asked[0]]
        else:
            made = {"copy": list, "reverse": lambda each: list(reversed(each)), "sort": sorted}[kind]
            assert answer == made(asked)


def test_a_row_says_how_many_steps_a_strategy_took_and_whether_its_texts_are_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "asked.jsonl"
    data.write_text('{"prompt": "1 2 3 1 2 3 1 2", "answer": "x"}\n' * 2)
    strategies = ("--strategies", "none", "prompt-lookup:policy=fixed")
    run(monkeypatch, "measure", "--model", "parlay-mini-draft", "--data", str(data), "--tokens", "8", *strategies)
    plain, copied = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert plain["tokens"] == plain["steps"] == 16
    assert copied["steps"] <= 16
    assert (copied["same"], copied["right"], copied["model"]) == (2, 0, "parlay-mini-draft")
