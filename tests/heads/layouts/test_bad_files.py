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
        (says(vocab_size=1 << 24), "was trained for a target of 16777216 tokens"),
        (says(eagle_config=5), "are no head in the layout of EAGLE-3"),
        (says(eagle_aux_hidden_state_layer_ids=["a", 1]), "are no head in the layout of EAGLE-3"),
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


MEDUSA, HYDRA, SPECULATOR = (published.medusa, published.hydra, published.mlp_speculator)
PEAGLE, MTP, SEQUENTIAL = (published.peagle, published.speculators_mtp, published.deepseek_mtp)
LAYER = "transformer_layer_config"


def layer_says(**fields: object) -> Edit:
    return lambda config, tensors: config[LAYER].update(fields)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ((MEDUSA, says(num_hidden_layers=2)), "num_hidden_layers is 2, and Parlay runs such heads only where it is 1"),
        ((MEDUSA, says(vocab_size=63)), "vocab_size is 63"),
        ((MEDUSA, says(num_heads=0)), "num_heads 0: expected an integer from 1 on"),
        ((MEDUSA, says(num_heads=10**9)), "num_heads is 1000000000"),
        ((MEDUSA, says(num_heads=3)), "lacks blocks.2.linear.weight, lm_heads.2.weight"),
        ((MEDUSA, says(num_heads=1)), "does not know blocks.1.linear.weight, lm_heads.1.weight"),
        ((MEDUSA, says(truncated_vocab_size=9)), "truncated_vocab_size is 9"),
        ((MEDUSA, says(logit_scale=0.5)), "logit_scale is 0.5"),
        ((MEDUSA, holds("token_map", torch.tensor([1, 1]))), "token_map does not name different tokens"),
        ((MEDUSA, holds("blocks.0.layers.1.weight", torch.ones(32, 32))), "does not know blocks.0.layers.1.weight"),
        ((HYDRA, says(hydra_head_arch="prefix-mlp")), "hydra_head_arch is prefix-mlp"),
        ((HYDRA, says(grounded_heads=False)), "grounded_heads is False"),
        ((HYDRA, says(hidden_state_offset=1)), "hidden_state_offset is 1"),
        ((HYDRA, says(hydra_num_layers=1)), "does not know hydra_mlp.0.1.linear.bias"),
        ((HYDRA, lacks("hydra_lm_head.1.bias")), "lacks heads.1.lm_head.bias"),
        ((SPECULATOR, says(emb_dim=64)), "emb_dim is 64"),
        ((SPECULATOR, says(n_predict=2)), "does not know emb.2.weight"),
        ((SPECULATOR, lacks("speculator.ln.1.bias")), "lacks ln.1.bias"),
        ((SPECULATOR, says(inner_dim=41)), "inner_dim is 41, and Parlay runs such heads only where it is 40"),
        ((SPECULATOR, says(inner_dim=10**7)), "inner_dim is 10000000"),
        ((SPECULATOR, says(inner_dim="40")), "inner_dim 40: expected an integer"),
        ((MEDUSA, holds("lm_heads.0.weight", torch.tensor(1.0))), "are no head in the layout of Medusa"),
        ((PEAGLE, lacks("mask_hidden")), "lacks mask_hidden"),
        ((PEAGLE, says(mask_token_id=None)), "mask_token_id None: expected an integer"),
        ((PEAGLE, says(mask_token_id=64)), "mask_token_id is 64"),
        ((PEAGLE, says(speculators_config={})), "speculators_config names no proposal method"),
        ((PEAGLE, says(speculators_model_type="dflash")), "speculators_model_type is dflash"),
        ((PEAGLE, says(**{LAYER: None})), f"config.json has no {LAYER}"),
        ((PEAGLE, layer_says(model_type="gemma3")), "model_type is gemma3"),
        ((PEAGLE, layer_says(layer_types=["sliding_attention"])), "layer_types is ['sliding_attention']"),
        ((PEAGLE, layer_says(num_hidden_layers=3)), "lacks layers.2."),
        ((MTP, says(num_nextn_predict_layers=2)), "num_nextn_predict_layers is 2"),
        ((MTP, layer_says(model_type="qwen3_next")), "model_type is qwen3_next"),
        ((SEQUENTIAL, says(num_nextn_predict_layers=2)), "num_nextn_predict_layers is 2"),
        ((SEQUENTIAL, says(num_hidden_layers=4)), "num_hidden_layers is 4"),
        ((SEQUENTIAL, says(kv_lora_rank=8)), "kv_lora_rank is 8"),
        ((SEQUENTIAL, holds("model.layers.3.mlp.experts.0.up_proj.weight", torch.ones(1))), "its layer has experts"),
        ((SEQUENTIAL, lacks("model.layers.3.enorm.weight")), "lacks enorm.weight"),
    ],
    ids=lambda each: each if isinstance(each, str) else each[0].__name__,
)
def test_each_layout_names_what_is_wrong(
    case: tuple[Callable[[DecoderConfig], tuple[dict[str, Any], dict[str, Tensor]]], Edit],
    told: str,
    config: DecoderConfig,
    find: ProvedHeads,
    tmp_path: Path,
) -> None:
    file, edit = case
    said, tensors = file(config)
    edit(said, tensors)
    assert told in refused(find, published.write(tmp_path, said, tensors))
