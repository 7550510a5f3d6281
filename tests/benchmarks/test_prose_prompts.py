"""Prompts for prose: the same ones for a seed, of all kinds, each filled in."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafters.prose_prompts import prompts

zstandard = pytest.importorskip("zstandard")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of the sets from which passages, meetings and sentences come."""
    folder = tmp_path_factory.mktemp("data")
    text = "The ferry came late. Anna Weber had waited at the harbour since noon.\nNobody knew why. " * 60
    meeting = {"meeting_transcripts": [{"speaker": "Chair", "content": "We go on."}] * 20}
    sets: dict[str, list[Any]] = {
        "books-pd/train-01": [{"text": text}],
        "books-pd/train-03": [{"text": text}],
        "us-speeches-pd/inaugural": [{"text": text}],
        "us-speeches-pd/state_union": [],
        "tech-prose-cc0/peps": [{"body": text}],
        "tech-prose-cc0/eips": [{"text": "too short"}],
        "qmsum/train": [meeting] * 120,
    }
    files = {f"{name}.jsonl": "\n".join(map(json.dumps, rows)) for name, rows in sets.items()}
    pairs = "\n".join(f"This is sentence number {n} of all.\tDas ist Satz {n}." for n in range(9))
    files |= {f"tatoeba/{name}.tsv": pairs for name in ("eng-deu", "eng-fra")}
    for name, content in files.items():
        path = folder / f"{name}.zst"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(zstandard.compress(content.encode()))
    return folder


def test_a_seed_gives_the_same_prompts(data: Path) -> None:
    assert prompts(data, 3) == prompts(data, 3)
    assert prompts(data, 3) != prompts(data, 4)


def test_prompts_of_all_kinds_are_filled_in(data: Path) -> None:
    found = prompts(data, 3)
    counts = Counter(one["category"] for one in found)
    assert counts["translation"] == 1100
    assert counts["qa"] == 900
    assert len(counts) == 12
    assert all(one["prompt"] for one in found)
    assert not [one for one in found if "{" in one["prompt"]], "a template was not filled in"
