"""Workloads: sets that ship here, and files in the shapes of others; what can't be read is named with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from parlay.bench import workloads
from parlay.bench.workloads import BUILT_IN, Item, Message, files
from parlay.bench.workloads.sets import book

PLAIN = {"prompt": "Once upon a time"}
TURN = {"role": "user", "content": "How far is it?"}

SHAPES: dict[str, tuple[dict[str, Any], Item]] = {
    "plain": (PLAIN, Item(id="0", prompt="Once upon a time")),
    "messages": (
        {"id": 7, "messages": [TURN], "max_tokens": 9, "references": ["a"], "prediction": "b"},
        Item(id="7", messages=(Message("user", "How far is it?"),), max_tokens=9, references=("a",), prediction="b"),
    ),
    "MT-bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write it.", "Shorter."]},
        Item(id="81", category="writing", messages=(Message("user", "Write it."),), follow_ups=("Shorter.",)),
    ),
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""},
        Item(id="HumanEval/0", prompt="def f():\n"),
    ),
    "GSM8K": ({"question": "2 + 2?", "answer": "#### 4"}, Item(id="0", messages=(Message("user", "2 + 2?"),))),
    "MBPP": (
        {"task_id": 11, "text": "Write f.", "code": "", "test_list": ["assert f()", "assert g()"]},
        Item(
            id="11",
            messages=(Message("user", "Write f.\n\nWrite it in Python. These must hold:\n\nassert f()\nassert g()"),),
        ),
    ),
    "BFCL": (
        {"id": "simple_0", "question": [[TURN], [{"role": "user", "content": "Back?"}]], "function": [{"name": "go"}]},
        Item(
            id="simple_0",
            messages=(
                Message("system", 'Answer with calls of these functions, as JSON.\n{"name": "go"}'),
                Message("user", "How far is it?"),
            ),
            follow_ups=("Back?",),
        ),
    ),
    "EditEval": (
        {"task_id": "E/0", "instruction": "Add one. ", "context": "", "input": "x = 1", "output": "x = 2"},
        Item(id="E/0", messages=(Message("user", "Add one.\n\nx = 1"),), prediction="x = 1"),
    ),
    "ShareGPT": (
        {"id": "q", "conversations": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "Go on"}]},
        Item(id="q", messages=(Message("user", "Go on"),)),
    ),
    "LLMA": (
        {"query": "Who?", "docs": ["Ada.", "Bob."], "result": {"text": "Ada."}},
        Item(id="0", messages=(Message("user", "Ada.\n\nBob.\n\nWho?"),), references=("Ada.", "Bob.")),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_published_shape_is_read(tmp_path: Path, shape: str) -> None:
    record, item = SHAPES[shape]
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(record) + "\n\n", encoding="utf-8")
    assert list(files.read(path)) == [item]


def test_arrays_and_compressed_files_are_the_same_set(tmp_path: Path) -> None:
    line = json.dumps(PLAIN) + "\n"
    (tmp_path / "set.jsonl").write_text(line)
    (tmp_path / "set.json").write_text(json.dumps([PLAIN], indent=1))
    (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "set.jsonl.zst").write_bytes(zstandard.compress(line.encode()))
    paths = sorted(tmp_path.iterdir())
    assert [files.stem(path) for path in paths] == ["set"] * 4
    assert [list(files.read(path)) for path in paths] == [[SHAPES["plain"][1]]] * 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b"', "line 2: not JSON"),
        (b'[{"prompt": "a"},\n{"prompt": ]', "line 2: not JSON"),
        (b'{"turns": ["a"]}\n\n{"prompt": "b"}', "line 3: 'turns' is missing"),
        (b'[{"prompt": "a"}, {"prompt": 3}]', "record 2: prompt is not a text"),
        (b'{"prompt": "a"}\n"b"', "line 2: not an object"),
        (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}', "line 2: not UTF-8"),
        (b'{"prompt": "\\ud800"}', "line 1: prompt is not valid Unicode"),
        (b'{"prompt": ""}', "line 1: the prompt is empty"),
        (b'{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens must be at least 1"),
        (b'{"turns": []}', "line 1: turns is not a list, or is empty"),
        (b'{"text": "a"}', "line 1: no known shape"),
        (b'{"prompt": "a", "id": ' + b"9" * 5000 + b"}", "line 1: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_malformed_file_is_one_line_that_names_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        list(files.read(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_of_texts_is_a_workload_with_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Name three rivers.\n\nTranslate this: ja\n")
    (workload,) = workloads.load([str(path)])
    assert workload.name == "mine.txt"
    assert [item.messages[0].content for item in workload.items] == ["Name three rivers.", "Translate this: ja"]


def test_files_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.zst").write_bytes(b"not zstd at all")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-4])
    damaged = bytearray(gzip.compress(b'{"prompt": "a"}' * 99))
    damaged[12:20] = b"\xff" * 8
    (tmp_path / "damaged.jsonl.gz").write_bytes(damaged)
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    for name in ("cut.jsonl.zst", "cut.jsonl.gz", "damaged.jsonl.gz", "empty.jsonl", "absent.jsonl", "."):
        with pytest.raises(ValueError, match=name):
            workloads.load([str(tmp_path / name)])
    with pytest.raises(ValueError, match=r"no workload 'edits'.*edit, copy"):
        workloads.load(["edits"])


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_UNPACKED", 1000)
    for name, pack in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(pack(b" " * 1001))
        with pytest.raises(ValueError, match="more than 1,000 bytes of text: unpack it first"):
            list(files.read(tmp_path / name))


def test_categories_of_a_file_become_workloads_and_names_are_unique(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    records = [{"turns": [str(number)], "category": "odd" if number % 2 else "even"} for number in range(5)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = workloads.load([f"mine={path}", str(path)], most=2)
    assert [(each.name, len(each.items)) for each in found] == [
        ("mine/even", 2),
        ("mine/odd", 2),
        ("question/even", 2),
        ("question/odd", 2),
    ]
    (tmp_path / "plain.jsonl").write_text(json.dumps(PLAIN))
    with pytest.raises(ValueError, match="two workloads are called edit"):
        workloads.load(["edit", f"edit={tmp_path / 'plain.jsonl'}"])


def test_the_built_in_sets_are_whole_and_the_same_everywhere() -> None:
    found = workloads.load(BUILT_IN)
    assert [workload.name for workload in found] == list(BUILT_IN)
    assert {len(workload.items) for workload in found} == {8}
    ids = [item.id for workload in found for item in workload.items]
    assert len(ids) == len(set(ids))
    assert found == workloads.load(BUILT_IN)


def test_filler_is_as_long_as_asked_and_no_line_comes_twice() -> None:
    text = book(1, 20_000)
    assert 20_000 <= len(text) < 20_300
    lines = text.split("\n")
    assert len(set(lines)) == len(lines)
    assert text == book(1, 20_000)
    assert text != book(2, 20_000)


def test_speed_bench_is_read_as_its_makers_publish_it(tmp_path: Path) -> None:
    """Rows of the columns of nvidia/SPEED-Bench: a workload for each category, the turns of a conversation in one."""
    more = {"sub_category": "python", "source": "s", "src_id": "1", "difficulty": "easy", "multiturn": True}
    rows = [{"question_id": str(n), "category": "coding", "turns": ["Write it.", "Test it."], **more} for n in range(2)]
    path = tmp_path / "speed-bench" / "qualitative.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (coding,) = workloads.load(["speed-bench"], data=tmp_path)
    assert (coding.name, len(coding.items)) == ("speed-bench/coding", 2)
    assert coding.items[0].messages[0].content == "Write it."


def test_published_sets_are_read_from_a_folder_and_their_categories_have_names(tmp_path: Path) -> None:
    path = tmp_path / "spec-bench" / "question.jsonl"
    path.parent.mkdir()
    questions = [{"category": name, "turns": [f"a {name} question"]} for name in ("writing", "rag", "writing")]
    path.write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    found = workloads.load(["spec-bench"], data=tmp_path)
    assert [(each.name, len(each.items)) for each in found] == [("spec-bench/writing", 2), ("spec-bench/rag", 1)]
    (rag,) = workloads.load(["spec-bench/rag"], data=tmp_path)
    assert rag == found[1]
    with pytest.raises(ValueError, match="no workload 'spec-bench/poems': spec-bench holds spec-bench/writing, "):
        workloads.load(["spec-bench/poems"], data=tmp_path)
    with pytest.raises(ValueError, match=r"humaneval needs --data DIR, a folder that holds humaneval/HumanEval\."):
        workloads.load(["humaneval"])


def test_a_document_that_the_question_quotes_is_not_said_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"query": "Sum up: first text", "docs": ["first text", "second text"]}))
    (item,) = files.read(path)
    assert item.messages[0].content == "second text\n\nSum up: first text"
    assert item.references == ("first text", "second text")
