"""A folder of text to train on, a text file and a file of JSON lines, and a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parlay.testing.checkpoints import save_random

SENTENCES = (
    "The harbour was quiet before the storm.",
    "Nobody in the village had seen such clouds.",
    "Martha closed the window and lit the lamp.",
    "A letter from her brother lay on the table.",
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_random("llama", folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Make a folder with some 20,000 characters of text."""
    root = tmp_path / "data"
    root.mkdir()
    paragraphs = (" ".join(SENTENCES[(n + at) % 4] for at in range(4)) + f" Part {n}." for n in range(80))
    (root / "novel.txt").write_text("\n\n".join(paragraphs))
    lines = (json.dumps({"text": f"Question {n}: {SENTENCES[n % 4]}"}) for n in range(120))
    (root / "questions.jsonl").write_text("\n".join(lines))
    return root
