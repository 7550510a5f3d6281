"""Models that several tests run."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.families.reading import read_config
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_weights
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.toy_tokenizers import toy_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three random models of two families with one tokenizer."""
    made = []
    for name, seed in (("llama", 1), ("qwen2", 2), ("llama", 3)):
        made.append(str(tmp_path_factory.mktemp(name)))
        save_random(name, Path(made[-1]), seed=seed)
        toy_tokenizer(VOCAB_SIZE).save_pretrained(made[-1])
    return made


@pytest.fixture(scope="module")
def checkpoint() -> tuple[DecoderConfig, dict[str, Tensor]]:
    """The built-in model's config and weights."""
    config = read_config(resolve("parlay-mini"))
    return config, load_weights(resolve("parlay-mini"), config)
