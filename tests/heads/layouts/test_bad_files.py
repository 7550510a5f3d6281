"""A file that Parlay can't run as it was meant is refused in one line that says why; nothing is unpickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parlay.drafters.heads.proving import ProvedHeads
from parlay.heads.artefact import BadHead
from parlay.heads.opening import opened
from parlay.models.config import DecoderConfig
from parlay.options import UsageError
from tests.heads.layouts import published

Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]


def says(**fields: object) -> Edit:
    return lambda config, tensors: config.update(fields)


def holds(name: str, tensor: Tensor) -> Edit:
    return lambda config, tensors: tensors.update({name: tensor})


def lacks(name: str) -> Edit:
    return lambda config, tensors: tensors.pop(name)


def refused(find: ProvedHeads, folder: Path, method: str = "eagle3") -> str:
    with pytest.raises(BadHead) as caught:
        find(method, str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lacks("lm_head.weight"), ""),
        (lacks("fc.weight"), "lacks fc.weight"),
        (lacks("d2t"), "lacks d2t, which says what its 24 draft tokens stand for"),
        (holds("input_norm.weight", torch.ones(4)), "does not know input_norm.weight"),
        (holds("norm.weight", torch.ones(3)), "has in another shape norm.weight"),
        (holds("norm.weight", torch.full((32,), torch.nan)), "norm.weight holds numbers that are not finite"),
        (holds("norm.weight", torch.ones(32, dtype=torch.int8)), "not quantized"),
        (holds("d2t", torch.full((24,), 99)), "d2t does not name different tokens of a target of 64"),
        (holds("embed_tokens.weight", torch.ones(8, 32)), "embed_tokens.weight is [8, 32] instead of [64, 32]"),
        (says(vocab_size=63), "was trained for a target of 63 tokens and 32 numbers, not 64 and 32"),
        (says(hidden_size=64), "was trained for a target of 64 tokens"),
        (says(num_hidden_layers=2), "num_hidden_layers is 2, and Parlay runs such heads only where it is 1"),
        (says(norm_before_fc=True), "norm_before_fc is True"),
        (says(fc_norm=True), "fc_norm is True"),
        (says(norm_output=True), "norm_output is True"),
        (says(target_hidden_size=64), "target_hidden_size is 64"),
        (says(parallel_drafting=True), "parallel_drafting is True"),
        (says(hidden_act="gelu"), "activation 'gelu' is not supported"),
        (says(attention_bias=True), "attention_bias is not supported"),
        (says(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope type 'dynamic' is not supported"),
        (says(draft_vocab_size="many"), "draft_vocab_size many: expected an integer"),
        (says(eagle_aux_hidden_state_layer_ids=[0, 1, 3]), "[0, 1, 3] are not layers below the last of a target"),
        (says(draft_vocab_size=None, architectures=["GPT2LMHeadModel"]), "expected an integer"),
    ],
)
def test_what_is_wrong_is_named(
    edit: Edit, told: str, config: DecoderConfig, find: ProvedHeads, tmp_path: Path
) -> None:
    said, tensors = published.eagle3(config)
    edit(said, tensors)
    folder = published.write(tmp_path, said, tensors)
    if told:
        assert told in refused(find, folder)
    else:
        assert find("eagle3", str(folder)) is not None, "the target's LM head stands for one that is not there"


def test_pickles_are_not_opened_and_a_line_says_how_to_convert_them(find: ProvedHeads, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({}))
    told = refused(find, tmp_path)
    assert "pickles are never opened here" in told
    assert "torch.load('medusa_lm_head.pt', weights_only=True)" in told


def test_a_file_that_is_cut_short_is_named(config: DecoderConfig, find: ProvedHeads, tmp_path: Path) -> None:
    folder = published.write(tmp_path, *published.eagle3(config))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors is damaged or cut short" in refused(find, folder)


def test_an_index_names_files_of_its_own_folder(config: DecoderConfig, find: ProvedHeads, tmp_path: Path) -> None:
    folder = published.write(tmp_path, *published.eagle3(config))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../other.safetensors"}}')
    assert "it names files of other folders" in refused(find, folder)


def test_a_folder_of_something_else_is_none_of_the_layouts(find: ProvedHeads, tmp_path: Path) -> None:
    published.write(tmp_path, {"model_type": "gpt2"}, {"wte.weight": torch.ones(2, 2)})
    assert "neither Parlay's own nor one of" in refused(find, tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "holds no draft head that can be read" in refused(find, tmp_path)


def test_another_methods_head_is_refused(config: DecoderConfig, find: ProvedHeads, tmp_path: Path) -> None:
    folder = published.write(tmp_path, *published.eagle3(config))
    with pytest.raises(UsageError, match="is a head for strategy eagle3"):
        opened("medusa", find, str(folder))
