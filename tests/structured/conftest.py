"""Grammars over the built-in model's vocabulary, and the model itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parlay import LLM
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.structured.grammars import Grammars
from parlay.types import Tokenizer

EOS = (0, 4)
"""The two ids that end a text of the built-in model."""


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("parlay-mini"))


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, 4096, EOS)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", seed=1) as model:
        yield model
