"""A tiny target, and a head for it with a proof."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parlay import models
from parlay.drafters.options import EAGLE3
from parlay.heads import artefact
from parlay.heads.artefact import HeadArtefact, Origin
from parlay.heads.proof import LENGTH, target_states
from parlay.options import LoadOptions
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.random_heads import random_heads
from parlay.train.recipes.target import Target
from parlay.train.saving import with_proof

LOAD = LoadOptions(dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_random("llama", folder)
    return folder


@pytest.fixture(scope="module")
def head(model: Path) -> HeadArtefact:
    """Make a head with a proof."""
    runner, target = models.load(str(model), LOAD), Target.named(str(model))
    opened = random_heads(runner.spec)(EAGLE3, "")
    assert opened is not None
    witness_WH = target.embedding_VH[artefact.witness_ids(VOCAB_SIZE)]
    origin = Origin("someone/toy", "ab" * 32, "code", "apache-2.0")
    made = replace(opened.artefact, witness_WH=witness_WH, origin=origin)
    torch.manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (LENGTH,)).tolist()
    taps = made.settings["taps"]
    states_TF = target_states(runner, ids, taps)
    assert states_TF is not None
    return with_proof(made, target, ids, dict(zip(taps, states_TF.chunk(len(taps), -1), strict=True)))
