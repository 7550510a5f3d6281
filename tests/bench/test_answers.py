"""Files of recorded answers: the usual shapes are read, and what is wrong in a file is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from parlay.bench.replay.answers import RecordedAnswer, read_answers


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


SHAPES = {
    "prompt": ({"prompt": "p", "output": "o", "dataset": "x"}, RecordedAnswer("p", "o")),
    "references": ({"prompt": "p", "answer": "o", "references": ["r"]}, RecordedAnswer("p", "o", ("r",))),
    "instruction": ({"instruction": "p", "output": "o"}, RecordedAnswer("p", "o")),
    "edit": ({"instruction": "do", "input": "text", "output": "o"}, RecordedAnswer("text\n\ndo", "o", ("text",))),
    "documents": (
        {"query": "q", "docs": ["a", "b"], "result": {"text": "o"}},
        RecordedAnswer("a\n\nb\n\nq", "o", ("a", "b")),
    ),
    "quoted": (
        {"query": "about a: q", "docs": ["a"], "result": {"text": "o"}},
        RecordedAnswer("about a: q", "o", ("a",)),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_of_known_files_are_read(shape: str, tmp_path: Path) -> None:
    record, answer = SHAPES[shape]
    assert list(read_answers(write(tmp_path / "a.jsonl", record))) == [answer]


def test_an_array_and_a_compressed_file_hold_the_same_answers(tmp_path: Path) -> None:
    records = [{"prompt": "é", "output": "1"}, {"prompt": "b", "output": "2"}]
    plain = write(tmp_path / "a.jsonl", *records)
    (tmp_path / "a.json").write_text(json.dumps(records), encoding="utf-8")
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    found = [list(read_answers(tmp_path / name)) for name in ("a.jsonl", "a.json", "a.jsonl.zst")]
    assert found[0] == found[1] == found[2] == [RecordedAnswer("é", "1"), RecordedAnswer("b", "2")]


MISTAKES = {
    "not JSON": ('{"prompt": "p", "output": "o"}\n\n{oops\n', "line 3: not JSON"),
    "no object": ('"text"\n', "line 1: not an object, but str"),
    "no object in an array": ("[1]\n", "record 1: not an object, but int"),
    "no answer": ('{"prompt": "p"}\n', "line 1: not a recorded answer, which has an answer in"),
    "no question": ('{"output": "o"}\n', "line 1: not a recorded answer"),
    "answer is no text": ('{"prompt": "p", "output": 3}\n', "line 1: output is not a text"),
    "references are no list": ('{"prompt": "p", "output": "o", "references": "r"}\n', "references is not a list"),
    "result is no object": ('{"query": "q", "docs": [], "result": "o"}\n', "line 1: result is not an object"),
    "half a character": ('{"prompt": "\\ud800", "output": "o"}\n', "line 1: prompt is not valid Unicode"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_is_named_with_its_line(mistake: str, tmp_path: Path) -> None:
    text, named = MISTAKES[mistake]
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl") as error:
        list(read_answers(tmp_path / "a.jsonl"))
    assert named in str(error.value)


def test_files_that_are_missing_or_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        list(read_answers(tmp_path / "none.jsonl"))
    (tmp_path / "a.jsonl").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match="line 1: not UTF-8"):
        list(read_answers(tmp_path / "a.jsonl"))
