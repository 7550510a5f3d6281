"""The models that come with the package: they load without a network, each as what it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from parlay import LLM, SamplingParams, models
from parlay.models.fetch.local_models import kept
from parlay.models.fetch.resolving import BUILT_IN, BUILT_IN_DRAFTS, resolve
from parlay.options import UsageError
from parlay.types import ParlayError


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_is_found_and_listed_with_its_size(name: str) -> None:
    assert resolve(name).exists()
    (listed,) = [model for model in kept() if model.name == name]
    assert listed.source == "built-in"
    assert listed.size > 1_000_000


def test_an_empty_name_is_not_the_present_folder() -> None:
    with pytest.raises(ParlayError, match="the model's name is empty"):
        resolve("")


def test_the_draft_model_of_smollm2_has_its_vocabulary_and_writes_text() -> None:
    draft = BUILT_IN_DRAFTS["smollm2-135m"]
    assert models.load(draft).spec.vocab_size == 49_152
    with LLM(draft) as llm:
        (answer,) = llm.generate(["The river"], SamplingParams(temperature=0, max_tokens=8), strategy="none")
    assert len(answer.outputs[0].token_ids) == 8
    assert answer.outputs[0].text.strip()


def copied(to: Path) -> Path:
    """The built-in model in a folder of the user's."""
    return Path(shutil.copytree(resolve("parlay-mini"), to / "mine"))


def test_a_target_is_known_by_its_embedding_whatever_its_folder_is_called(tmp_path: Path) -> None:
    with LLM(str(copied(tmp_path)), strategy="draft-model") as llm:
        assert llm.draft_models == (BUILT_IN_DRAFTS["parlay-mini"],)
        assert "draft-model" in llm.offered()


def test_another_model_of_the_same_shape_has_no_draft_model_and_says_so(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with LLM(str(folder), strategy="none") as llm, pytest.raises(UsageError, match="no draft model goes with this"):
        llm.generate(["The river"], strategy="draft-model")
