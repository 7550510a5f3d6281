"""A tiny model with random weights, whose tokens are single letters."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from parlay.bench.workloads import Item, Workload
from parlay.llm import LLM
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.toy_tokenizers import letters

ALPHABET = (string.ascii_letters + string.digits + " \n.")[:VOCAB_SIZE]

LETTERS = Workload("letters", tuple(Item(id=str(at), prompt=text, max_tokens=12) for at, text in enumerate("abc")))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `tiny`."""
    directory = tmp_path_factory.mktemp("tiny") / "llama"
    save_random("llama", directory)
    return directory


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    """Open the tiny model. It reads up to 256 tokens, writes nonsense, and repeats itself under greedy decoding."""
    with LLM(str(tiny_folder), tokenizer=letters(ALPHABET), dtype="float32", strategy="none") as llm:
        yield llm
