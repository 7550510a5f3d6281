"""The tasks on which models with canvases are measured have one right answer, and a row says how many were given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.canvases.__main__ import main
from benchmarks.canvases.trace import Played, _served, mixture


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


def test_the_mixed_trace_has_one_right_answer_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "mixed", str(tmp_path), "--count", "20", "--held", "6")
    for line in (tmp_path / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "sums":
            total, *addends = map(int, row["prompt"].removeprefix("sum: ").removesuffix(":").split(" + "))
            for step, addend in zip(row["answer"].strip(" .").split(", "), addends, strict=True):
                assert step == f"{total} + {addend} = {total + addend}"
                total += addend
        else:
            given, asked_for = row["prompt"].removeprefix("record: ").removesuffix(":").split(". ")
            verb, names = asked_for.split(" ", 1)
            record = dict(field.split(" ") for field in given.split(", "))
            if row["kind"] == "json":
                said = json.loads(row["answer"])
                assert (verb, list(said)) == ("json", names.split(", "))
                assert said == record
            else:
                assert row["answer"] == f" {', '.join(record[name] for name in names.split(', '))}."
    asked = {json.loads(line)["prompt"] for line in (tmp_path / "held.jsonl").read_text().splitlines()}
    calibrated = {json.loads(line)["prompt"] for line in (tmp_path / "calibrate.jsonl").read_text().splitlines()}
    assert calibrated
    assert not asked & calibrated


def test_kinds_follow_each_other_in_the_trace() -> None:
    rows = [{"kind": kind, "prompt": f"{kind} {n}"} for n in range(9) for kind in ("lookup", "lookup", "sums", "json")]
    trace, others = mixture(rows, 10, ["lookup", "lookup", "sums"])
    assert [row["kind"] for row in trace] == ["lookup", "lookup", "sums"] * 3
    assert len(others) == (18 - 6) + (9 - 3)
    assert not {id(row) for row in trace} & {id(row) for row in others}
    assert [row["kind"] for row in mixture(rows, 3, ["json", "sums", "lookup"])[0]] == ["json", "sums", "lookup"]
    with pytest.raises(ValueError, match="9 rows of kind sums are too few for 30 requests"):
        mixture(rows, 30, ["lookup", "sums"])


def test_a_way_is_compared_with_the_first_one_round_by_round() -> None:
    rows = [{"kind": "lookup", "answer": " a."}, {"kind": "sums", "answer": " 3."}]

    def answers(*texts: str, steps: int, way: str) -> list[dict[str, object]]:
        return [{"text": text, "way": way, "tokens": 2, "steps": steps} for text in texts]

    plain = Played([2.0, 4.0], [1.0, 1.0], [answers(" a.", " 4.", steps=2, way="none")] * 2)
    other = Played(
        [1.0, 1.0], [0.5, 1.0], [answers(" a.", " 4.", steps=1, way="x"), answers(" b.", " 4.", steps=1, way="y")]
    )
    row = _served("other", rows, {"plain": plain, "other": other}, "plain")
    assert (row["tokens"], row["steps"], row["rounds"]) == (8, 4, 2)
    assert (row["seconds_ratios"], row["seconds_ratio"]) == ([2.0, 4.0], 3.0)
    assert row["processor_seconds_ratio"] == 1.5
    assert row["lookup"] == {"of": 2, "right": 1, "same": 1, "steps": 2, "ways": {"x": 1, "y": 1}}
    assert (row["sums"]["right"], row["sums"]["same"]) == (0, 2)


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
