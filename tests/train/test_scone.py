"""A run with n-grams ends in a checkpoint and a table that Parlay's decoder reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parlay import models
from parlay.models.loading import load_tokenizer
from parlay.options import LoadOptions
from parlay.train.scone import SconeOptions, train
from parlay.types import Segment
from tests.train.tiny_lm import tiny


def options(data: Path, folder: Path, **more: int) -> SconeOptions:
    return tiny(SconeOptions, data, folder, tokens=2000, **more)


def test_a_trained_model_reads_its_table(data: Path, tmp_path: Path) -> None:
    """The decoder's loss is the trainer's own, but for rounding to bfloat16; a run of tokens has a known end."""
    out = train(options(data, tmp_path, ngrams=150, longest=3))
    record = json.loads((out / "provenance.json").read_text())
    assert (record["tokens"], record["steps"]) == (2048, 8)
    assert json.loads((out / "config.json").read_text())["ngrams"]["count"] == 150
    stream = torch.tensor(load_tokenizer(out).encode((data / "novel.txt").read_text())[:600])
    runner = models.load(str(out), LoadOptions(dtype="float32"), cache_tokens=1024)
    runner.open(0, ())
    assert runner.reserve(0, 600)
    logits = runner.forward([Segment(0, tuple(stream[:-1].tolist()))]).logits_RV
    loss = float(torch.nn.functional.cross_entropy(logits, stream[1:]))
    assert loss == pytest.approx(record["checks"][-1]["loss"], abs=0.4)
    assert loss < 5


@pytest.mark.parametrize("longest", [0, 9])
def test_ngrams_of_no_or_too_many_tokens_are_refused(tmp_path: Path, longest: int) -> None:
    with pytest.raises(ValueError, match=r"longest must be at (least|most)"):
        options(tmp_path, tmp_path, longest=longest)
