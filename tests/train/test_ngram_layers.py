"""A run ends in a checkpoint whose first layers Parlay looks up, and a table of them can be computed ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parlay import models
from parlay.models.loading import load_tokenizer
from parlay.models.native import NativeRunner
from parlay.options import LoadOptions
from parlay.testing.checkpoints import save_random
from parlay.train.ngram_layers import NgramLayersOptions, NgramStatesOptions, compute_states, train
from parlay.types import ParlayError, Segment
from tests.train.tiny_lm import tiny


def options(data: Path, folder: Path, **more: int) -> NgramLayersOptions:
    return tiny(NgramLayersOptions, data, folder, tokens=2000, **more)


def test_a_trained_model_is_looked_up(data: Path, tmp_path: Path) -> None:
    """The decoder's loss is the trainer's own, but for rounding to bfloat16; with a table, bit for bit the same."""
    out = train(options(data, tmp_path, first_layers=2, window=2))
    record, config = (json.loads((out / name).read_text()) for name in ("provenance.json", "config.json"))
    assert (config["ngram_layers"], config["num_hidden_layers"]) == (2, 4)
    stream = torch.tensor(load_tokenizer(out).encode((data / "novel.txt").read_text())[:600])

    def logits() -> torch.Tensor:
        runner = models.load(str(out), LoadOptions(dtype="float32"), cache_tokens=1024)
        assert isinstance(runner, NativeRunner)
        runner.open(0, ())
        assert runner.reserve(0, 600)
        found = runner.forward([Segment(0, tuple(stream[:-1].tolist()))]).logits_RV
        assert runner.lookup is not None
        assert (runner.lookup.counts.mapped > 0) == (out / "ngram-states.safetensors").exists()
        return found

    computed = logits()
    loss = float(torch.nn.functional.cross_entropy(computed, stream[1:]))
    assert loss == pytest.approx(record["checks"][-1]["loss"], abs=0.4)
    for ngrams in (50, 100):  # the second time a table is there
        compute_states(NgramStatesOptions(model=str(out), data=data, dtype="float32", ngrams=ngrams))
        assert logits().equal(computed)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"window": 1}, "window must be at least 2"),
        ({"window": 9}, "window must be at most 8"),
        ({"first_layers": 0}, "first_layers must be at least 1"),
        ({"first_layers": 4, "window": 3}, "together they see 9 tokens, and 8 can be looked up"),
    ],
)
def test_layers_that_see_nothing_or_too_much_are_refused(tmp_path: Path, said: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(tmp_path, tmp_path, **said)


def test_a_table_needs_a_model_that_reads_it(data: Path, tmp_path: Path) -> None:
    save_random("qwen3", tmp_path / "plain")
    with pytest.raises(ParlayError, match=r"no layers of .* are looked up"):
        compute_states(NgramStatesOptions(model=str(tmp_path / "plain"), data=data))
