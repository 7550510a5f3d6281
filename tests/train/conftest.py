"""A data directory of the real layout with a few made-up records in every file, and a library of three modules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import zstandard

from parlay.train import corpus

SENTENCES = (
    "The harbour was quiet before the storm.",
    "Nobody in the village had seen such clouds.",
    "Martha closed the window and lit the lamp.",
    "A letter from her brother lay on the table.",
)
MODULE = '''"""Module {n}."""


def scale_values(values, factor):
    """Multiply every value by the factor."""
    scaled = []
    for value in values:
        scaled.append(value * factor)
    return scaled


def join_parts{n}(parts, separator=", "):
    # Empty parts are left out.
    kept = [part for part in parts if part]
    return separator.join(kept)
'''


def write(path: Path, text: str) -> None:
    """Writes text, compressed where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = text.encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(raw) if path.suffix == ".zst" else raw)


def lines(records: Iterable[Mapping[str, object]]) -> str:
    """JSON lines."""
    return "\n".join(json.dumps(record) for record in records) + "\n"


def prose(n: int) -> str:
    """A document of a few paragraphs, unlike the others."""
    return "\n\n".join(f"Part {n}.{k}. " + " ".join(SENTENCES[(n + k + i) % 4] for i in range(4)) for k in range(6))


def dialogue(n: int) -> dict[str, object]:
    """An order with four calls."""
    turns: list[dict[str, object]] = []
    for k in range(4):
        annotations = [
            ["api_call", "add_item"],
            ["request", json.dumps({"name": f"tea {n}", "size": "medium", "cups": k})],
            ["api_response", "add_item"],
            ["response", json.dumps({"order": n, "state": "accepted"})],
        ]
        turns.append({"speaker": "user", "text": f"One more tea {n} please", "ann": annotations})
        turns.append({"speaker": "assistant", "text": "Anything else?"})
    return {"id": f"dlg-{n}", "scenario": "tea", "turns": turns}


def write_texts(root: Path) -> None:
    """Prose, speeches, proposals."""
    titled = [{"title": f"Title {n}", "text": prose(n)} for n in range(60)]
    write(root / "books-pd/train-00.jsonl.zst", lines(titled[:30]))
    write(root / "books-pd/heldout.jsonl.zst", lines(titled[30:40]))
    write(root / "tech-prose-cc0/peps.jsonl.zst", lines(titled))
    write(root / "us-speeches-pd/inaugural.jsonl.zst", lines(titled))


def write_pairs(root: Path) -> None:
    """Questions and answers, instructions, translations."""
    sums = [
        {"question": f"What is {n} plus 1?", "answer": f"{n}+1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
        for n in range(80)
    ]
    write(root / "gsm8k/train.jsonl.zst", lines(sums))
    pairs = [{"prompt": f"Name number {n}.", "completion": f"It is {n}."} for n in range(60)]
    write(root / "oasst-commitpackft-sample/oasstcommitpackftmanual.jsonl.zst", lines(pairs))
    seed = {"instruction": "Say yes.", "instances": [{"input": "", "output": "Yes."}]}
    write(root / "self-instruct-human/seed_tasks.jsonl", lines([seed]))
    write(root / "self-instruct-human/user_oriented_instructions.jsonl", lines([seed]))
    write(root / "scitldr/train.jsonl.zst", lines([{"source": ["We study tea."], "target": ["Tea."]}]))
    for code in ("fra", "deu"):
        rows = [f"Sentence {n % 150}.\tPhrase {n} {code}." for n in range(600)]
        write(root / f"tatoeba/eng-{code}.tsv.zst", "\n".join(rows) + "\n")


def write_code(root: Path) -> None:
    """Small tasks and puzzles."""
    tasks: list[dict[str, object]] = [
        {
            "task_id": n,
            "text": f"Task {n}.",
            "code": f"def f{n}():\r\n\treturn {n}",
            "test_list": [f"assert f{n}() == {n}"],
        }
        for n in range(1, 600)
    ]
    write(root / "mbpp/mbpp.jsonl", lines(tasks))
    puzzle: dict[str, object] = {
        "name": "P:0",
        "sat": "def sat(x: int):\n    return x == 3",
        "sol_header": "def sol():",
    }
    puzzle |= {"sol_docstring": '    """Find three."""', "sol_bodies": ["    return 3"]}
    write(root / "p3-puzzles/puzzles_no_humaneval.json.zst", json.dumps([puzzle]))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory; the standard library is replaced by a few modules for the sake of time."""
    root = tmp_path / "data"
    write_texts(root)
    write_pairs(root)
    write_code(root)
    write(root / "taskmaster4/tm4_dialogs.jsonl.zst", lines([dialogue(n) for n in range(80)]))
    for n in range(60):
        write(tmp_path / f"library/module{n}.py", MODULE.replace("{n}", str(n)) * 2)
    monkeypatch.setattr(corpus, "library_root", lambda: tmp_path / "library")
    return root
