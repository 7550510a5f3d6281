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
from parlay.drafters.heads.modules import check_tensors
from parlay.drafters.heads.proving import ProvedHeads
from parlay.drafters.resources import Resources
from parlay.heads import artefact
from parlay.heads.artefact import BadHead, HeadArtefact
from parlay.heads.opening import TargetHeads, heads_of
from parlay.heads.store import StoredDrafter
from parlay.llm import LLM
from parlay.llm.request_options import RequestOptions
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner
from parlay.models.weights.fused import Operand
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.checkpoints import VOCAB_SIZE
from parlay.testing.random_heads import random_heads
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
        ({"num_heads": 4, "num_kv_heads": 8}, "num_kv_heads must be a divisor of 4, the number of heads, got 8"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1"),
        ({"head_dim": 7}, "head_dim must be an even number, got 7"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number of at least 0, got nan"),
        ({"head_dim": 8.0}, "its layer has head_dim 8.0"),
        ({"ngrams": {"longest": 3}}, "its layer has ngrams"),
        ({"ngram_layers": True}, "its layer has ngram_layers True"),
        ({"rope": {"attention_factor": 10**400, "divisors": []}}, "too large"),
    ],
)
def test_a_head_whose_layer_has_sizes_that_nothing_can_run_is_refused(
    heads: TargetHeads, folder: Path, said: dict[str, object], told: str
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


@pytest.mark.parametrize(
    "d2t",
    [
        torch.full((16,), VOCAB_SIZE),
        torch.full((16,), -1),
        torch.full((16,), 1 << 62),
        torch.zeros(16),
        torch.zeros(16, dtype=torch.uint8),
    ],
)
def test_a_head_that_drafts_what_the_target_does_not_know_is_refused(head: HeadArtefact, d2t: torch.Tensor) -> None:
    """Kernels read the embeddings of drafted tokens."""
    count = len(head.tensors["d2t"])
    wrong = {**head.tensors, "d2t": d2t[:1].expand(count).clone()}
    with pytest.raises(BadHead, match="d2t does not name tokens of a target of"):
        check_tensors(replace(head, tensors=wrong))


@pytest.mark.parametrize(
    ("method", "said", "told"),
    [
        ("medusa", {"heads": 10**9}, "says heads 1000000000: expected a whole number from 1 to 64"),
        ("medusa", {"heads": 0}, "says heads 0"),
        ("medusa", {"heads": 2.0}, "says heads 2.0"),
        ("kangaroo", {"taps": [0, 1]}, r"says taps \[0, 1\]: expected one layer"),
        ("medusa", {"taps": []}, r"says taps \[\]: expected different layers"),
        ("medusa", {"taps": [0] * 10_000}, "says taps"),
        ("medusa", {"taps": [-1]}, "says taps"),
        ("medusa", {"acceptance": []}, "says acceptance"),
        ("medusa", {"acceptance": [[]]}, "says acceptance"),
        ("medusa", {"acceptance": [[float("nan")]]}, "says acceptance"),
        ("medusa", {"draft_vocab_size": -1}, "says draft_vocab_size -1"),
        ("mlp-speculator", {"form": {"inner": -1}}, "lacks a setting, or has one of another kind"),
        ("block-drafter", {"layers": 10**9}, "says layers 1000000000"),
        ("block-drafter", {"length": 10**9}, "says length 1000000000"),
        ("block-drafter", {"mask_id": VOCAB_SIZE}, "says mask_id"),
        ("bita", {"prefix": 10**12}, "says prefix"),
        ("speculative-streaming", {"join": -1}, "says join -1"),
    ],
)
def test_settings_that_nobody_has_are_refused_before_anything_is_built(
    model: Path, method: str, said: dict[str, object], told: str
) -> None:
    opened = random_heads(models.load(str(model), LOAD).spec)(method, "")
    assert opened is not None
    check_tensors(opened.artefact)
    with pytest.raises(BadHead, match=told):
        check_tensors(replace(opened.artefact, settings={**opened.artefact.settings, **said}))


@pytest.mark.parametrize(("method", "name"), [("redrafter", "taps"), ("medusa", "acceptance"), ("ppd", "acceptance")])
def test_a_setting_that_is_missing_is_named(model: Path, method: str, name: str) -> None:
    opened = random_heads(models.load(str(model), LOAD).spec)(method, "")
    assert opened is not None
    settings = {key: value for key, value in opened.artefact.settings.items() if key != name}
    with pytest.raises(BadHead, match=f"a head for {method} lacks the setting {name}"):
        check_tensors(replace(opened.artefact, settings=settings))


def test_counts_of_n_grams_have_a_column_for_each_token_and_one(model: Path) -> None:
    opened = random_heads(models.load(str(model), LOAD).spec)("dynamo", "")
    assert opened is not None
    wrong = {**opened.artefact.tensors, "ngrams.2": torch.zeros(4, 9, dtype=torch.int32)}
    with pytest.raises(BadHead, match=r"has in another shape ngrams\.2"):
        check_tensors(replace(opened.artefact, tensors=wrong))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "kangaroo", "dynamo", "block-drafter"])
def test_a_head_with_more_logits_than_draft_tokens_is_refused(model: Path, method: str) -> None:
    """Kernels write a row's logits where there is room for its draft tokens."""
    opened = random_heads(models.load(str(model), LOAD).spec)(method, "")
    assert opened is not None
    held = opened.artefact
    for shape in ((4 * VOCAB_SIZE, held.layer.hidden_size), (len(held.tensors["d2t"]), 2 * held.layer.hidden_size)):
        wrong = {**held.tensors, "lm_head.weight": torch.zeros(shape)}
        with pytest.raises(BadHead, match=r"here: a head for .* has in another shape lm_head\.weight"):
            ProvedHeads(lambda *_, wrong=wrong: replace(opened, artefact=replace(held, tensors=wrong)))(method, "here")
