"""A small target, and helpers that find heads for it and decode with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parlay import models
from parlay.drafters.heads.proving import ProvedHeads
from parlay.heads.opening import heads_of
from parlay.llm import LLM
from parlay.models.config import DecoderConfig
from parlay.testing.checkpoints import VOCAB_SIZE
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.text.prompts import TokensPrompt
from parlay.train.recipes.target import Target
from parlay.types import RunnerSpec, SamplingParams
from tests.heads.conftest import LOAD

Drafts = Callable[[str, Path], None]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def target(model: Path) -> Target:
    return Target.named(str(model))


@pytest.fixture(scope="session")
def config(target: Target) -> DecoderConfig:
    return target.config


def spec_of(model: Path) -> RunnerSpec:
    return models.load(str(model), LOAD).spec


@pytest.fixture
def find(model: Path) -> ProvedHeads:
    """Find heads as strategies do."""
    return ProvedHeads(heads_of(str(model), spec_of(model), None))


@pytest.fixture
def drafts(model: Path) -> Drafts:
    """``drafts(method, folder)`` checks that the strategy drafts with the folder's head, and gives plain decoding's
    text."""

    def check(method: str, folder: Path) -> None:
        prompt, greedy = TokensPrompt(prompt_token_ids=[3, 4]), SamplingParams(temperature=0, max_tokens=12)
        with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
            plain, drafted = (
                llm.generate([prompt], greedy, strategy=strategy)[0].outputs[0]
                for strategy in ("none", f"{method}:head={folder},policy=fixed")
            )
        assert drafted.token_ids == plain.token_ids
        assert drafted.metrics.draft_tokens > 0

    return check
