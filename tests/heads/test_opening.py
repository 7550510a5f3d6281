"""A head is read and proved once for a model, however many strategies with settings of their own use it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parlay import models
from parlay.drafters.resources import Resources
from parlay.heads import artefact
from parlay.heads.artefact import BadHead, HeadArtefact
from parlay.heads.opening import TargetHeads, heads_of
from parlay.heads.store import StoredDrafter
from parlay.llm import LLM
from parlay.llm.input_processor import RequestOptions
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner
from parlay.models.weights.fused import Operand
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.checkpoints import VOCAB_SIZE
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.types import Metrics, SamplingParams
from tests.heads.conftest import LOAD


@pytest.fixture
def folder(head: HeadArtefact, tmp_path: Path) -> Path:
    artefact.save(tmp_path / "head", head, "# A toy\n")
    return tmp_path / "head"


@pytest.fixture
def heads(model: Path) -> TargetHeads:
    return heads_of(str(model), models.load(str(model), LOAD).spec, None)


def test_a_head_is_read_once_and_again_when_its_files_have_changed(heads: TargetHeads, folder: Path) -> None:
    first = heads("eagle3", str(folder))
    assert heads("eagle3", str(folder)) is first
    os.utime(folder / artefact.WEIGHTS, ns=(1, 1))
    assert heads("eagle3", str(folder)) is not first


def test_only_the_latest_heads_are_held(heads: TargetHeads, head: HeadArtefact, tmp_path: Path) -> None:
    """Who names many folders does not fill the memory."""
    folders = [tmp_path / f"head{number}" for number in range(9)]
    for each in folders:
        artefact.save(each, head, "# A toy\n")
    first, *others = [heads("eagle3", str(each)) for each in folders]
    assert heads("eagle3", str(folders[-1])) is others[-1]
    assert heads("eagle3", str(folders[0])) is not first


def test_a_head_of_a_deeper_model_with_the_same_embedding_does_not_fit(
    heads: TargetHeads, head: HeadArtefact, tmp_path: Path
) -> None:
    """Such a target is made by parlay prune: by itself it has no head."""
    folder = tmp_path / "deep"
    artefact.save(folder, replace(head, settings={**head.settings, "taps": [0, 1, 99]}), "# A toy\n")
    assert not heads.fits(StoredDrafter("deep", folder, artefact.read_facts(folder)))
    with pytest.raises(artefact.BadHead, match=r"reads layer 99, and .* has \d+: choose another head"):
        heads("eagle3", str(folder))


def test_a_head_that_was_damaged_meanwhile_is_refused(heads: TargetHeads, folder: Path) -> None:
    assert heads("eagle3", str(folder)) is not None
    (folder / artefact.WEIGHTS).write_bytes(b"none")
    with pytest.raises(artefact.BadHead):
        heads("eagle3", str(folder))


def test_strategies_with_other_settings_prove_and_pack_nothing_again(heads: TargetHeads, folder: Path) -> None:
    opened = heads("eagle3", str(folder))
    assert opened is not None
    asked: list[int] = []
    packed: list[NativeRunner] = []

    def make_runner(config: DecoderConfig, weights: Mapping[str, Operand]) -> NativeRunner:
        packed.append(opened.make_runner(config, weights))
        return packed[-1]

    counted = replace(opened, make_runner=make_runner, states=lambda ids, layers: asked.append(len(ids)))
    runner = models.load("parlay-mini", LOAD)
    resources = Resources(VOCAB_SIZE, lambda name: runner, find_head=lambda method, name: counted)
    for settings in ("", ":width=2", ":width=3"):
        assert build(parse(f"eagle3{settings}"), resources) is not None
    assert len(asked) == len(packed) == 1


def test_strategies_that_share_a_head_draft_as_they_do_alone(model: Path, folder: Path) -> None:
    """Their sequences lie in one cache, and do not meet there."""
    specs = [f"eagle3:head={folder},policy=fixed,k=3,width={width}" for width in (2, 3)]
    with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:

        def drafted(strategies: Sequence[str]) -> list[tuple[int, int, int]]:
            options = [RequestOptions(strategy=each, store=False) for each in strategies]
            for each in options:
                llm.add(llm.job({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=30), each))
            found: dict[str, Metrics] = {}
            while not llm.engine.idle:
                found |= {event.request: event.metrics for event in llm.engine.step() if event.metrics}
            return sorted((each.steps, each.draft_tokens, each.accepted_tokens) for each in found.values())

        alone = [counts for spec in specs for counts in drafted([spec])]
        assert all(draft_tokens for _, draft_tokens, _ in alone)
        assert drafted(specs) == sorted(alone)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"hidden_size": 64}, "trained for a target of .* and 64 numbers"),
        ({"num_heads": 4, "num_kv_heads": 8}, "num_kv_heads 8: expected a divisor of 4"),
        ({"num_kv_heads": 0}, "num_kv_heads 0: expected at least 1"),
        ({"head_dim": 7}, "head_dim 7: expected an even number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
    ],
)
def test_a_head_whose_layer_has_sizes_that_nothing_can_run_is_refused(
    heads: TargetHeads, folder: Path, said: dict[str, float], told: str
) -> None:
    """Kernels read and divide by what a folder says, whoever wrote it."""
    config = json.loads((folder / artefact.CONFIG).read_text())
    config["layer"] |= said
    (folder / artefact.CONFIG).write_text(json.dumps(config))
    with pytest.raises(BadHead, match=told):
        heads("eagle3", str(folder))


def test_a_head_with_an_embedding_of_fewer_tokens_is_refused(
    heads: TargetHeads, head: HeadArtefact, tmp_path: Path
) -> None:
    few = {**head.tensors, "embed_tokens.weight": torch.zeros(VOCAB_SIZE - 1, head.layer.hidden_size)}
    artefact.save(tmp_path / "few", replace(head, tensors=few), "# A toy\n")
    with pytest.raises(BadHead, match="and its embedding has"):
        heads("eagle3", str(tmp_path / "few"))
