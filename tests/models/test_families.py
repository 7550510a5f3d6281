"""Every family computes what transformers computes, from folders and from GGUF files; the rest is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from parlay import models
from parlay.bench.plan.shapes import shape_of
from parlay.compiled.library import SWITCH
from parlay.models import NativeRunner
from parlay.models.config import UnsupportedModel
from parlay.models.families import reading
from parlay.models.families.reading import read_config
from parlay.models.families.table import CAUSAL
from parlay.models.families.table import FAMILIES as FAMILY_OF
from parlay.models.loading import load_weights
from parlay.models.torch_ops import eager
from parlay.models.torch_ops.kernels import judge
from parlay.models.weights.shapes import BadCheckpoint
from parlay.options import LoadOptions
from parlay.ranks.layout import Layout
from parlay.testing.checkpoints import FAMILIES, NATIVE, VOCAB_SIZE, random_model, save_random
from parlay.types import ParlayError, Segment
from tests.models import family_files

FP32 = LoadOptions(dtype="float32", device="cpu")
NO_FILES = ("seed-oss", "exaone4", "glm", "glm4-moe", "granite4", "granite4-moe")
ROWS = [*(name for name in FAMILIES if name not in NO_FILES), "gemma2"]
"""Families that files hold, too."""
TOKENS = torch.randint(VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(model: Path, tokens: Sequence[int] = TOKENS, longest: int | None = None) -> Tensor:
    """``[N, V]``, fed in two chunks so that cached keys matter."""
    runner = models.load(str(model), FP32, cache_tokens=2 * len(tokens), longest=longest)
    assert isinstance(runner, NativeRunner)
    runner.open(0, tokens)
    assert runner.reserve(0, len(tokens))
    first = runner.forward([Segment(0, tuple(tokens[:40]))]).logits_RV
    runner.keep(0, ())
    return torch.cat((first, runner.forward([Segment(0, tuple(tokens[40:]))]).logits_RV)).float()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers_with_every_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a hundred thousandth of the largest; the text is longer than the windows of its layers."""
    model = save_random(name, tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    for kernels in ("compiled", "exact", "masked"):
        if kernels != "compiled":
            monkeypatch.setenv(SWITCH, "0")
        if kernels == "masked":
            monkeypatch.setattr(eager, "judge", lambda *asked, **how: replace(judge(*asked, **how), form=None))
        found = logits(tmp_path)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), kernels
        assert found.argmax(-1).equal(expected.argmax(-1)), kernels


def texts_of(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The prompts, each with ``count`` greedy tokens, written side by side."""
    runner = models.load(str(model), FP32, cache_tokens=8192)
    texts, fed = [list(prompt) for prompt in prompts], [tuple(prompt) for prompt in prompts]
    for name, prompt in enumerate(prompts):
        runner.open(name, prompt)
        assert runner.reserve(name, len(prompt) + count)
    for _ in range(count):
        segments = [Segment(name, new, logits_from=len(new) - 1) for name, new in enumerate(fed)]
        chosen = runner.forward(segments).logits_RV.argmax(-1).tolist()
        for name, token in enumerate(chosen):
            runner.keep(name, ())
            texts[name].append(token)
        fed = [(token,) for token in chosen]
    return texts


@pytest.mark.parametrize("name", [*FAMILIES, *NATIVE])
def test_greedy_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """20 prompts of 24 tokens, 64 tokens each. transformers reads a whole text at once: then its greedy text is the
    same if each token is its choice after those before."""
    model = save_random(name, tmp_path)
    prompts = torch.randint(VOCAB_SIZE, (20, 24), generator=torch.Generator().manual_seed(2))
    texts = torch.tensor(texts_of(tmp_path, prompts.tolist(), 64))
    with torch.no_grad():
        choices = model(input_ids=texts).logits[:, 23:-1].argmax(-1)
    assert choices.equal(texts[:, 24:])


def test_every_family_that_writes_token_by_token_is_compared_with_transformers() -> None:
    """Those that read the text part of a model of images have a test of their own."""
    compared = {type(random_model(name)).__name__ for name in (*FAMILIES, *NATIVE)}
    images = {family.architecture for family in CAUSAL if family.left_out}
    assert {family.architecture for family in CAUSAL} == compared | images


@pytest.mark.parametrize("name", ROWS)
def test_a_gguf_file_computes_the_same(name: str, tmp_path: Path) -> None:
    save_random(name, tmp_path)
    written = family_files.write(tmp_path / "model.gguf", tmp_path)
    torch.testing.assert_close(logits(written), logits(tmp_path), rtol=0, atol=5e-6)


def test_texts_beyond_the_original_context_are_computed_with_the_factors_for_long_ones(tmp_path: Path) -> None:
    """As transformers computes a text of that length, from folders and from files. By default texts end before."""
    model = save_random("phi4-mini", tmp_path)
    tokens = torch.randint(VOCAB_SIZE, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    for folder in (tmp_path, family_files.write(tmp_path / "model.gguf", tmp_path)):
        assert models.load(str(folder), FP32).spec.max_context == 256
        found = logits(folder, tokens, longest=512)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def change(directory: Path, **values: object) -> None:
    said = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**said, **values}))


def test_blocks_of_mxfp4_stay_as_they_are_and_stand_for_what_their_maker_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the same checkpoint whose experts were made plain numbers by transformers."""
    monkeypatch.setenv(SWITCH, "0")  # the compiled decoder would round the inputs of blocks to eight bits
    save_random("gpt-oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    plain, packed = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(118, 126, blocks.shape[:-1], generator=generator).to(torch.uint8)
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    expected = logits(tmp_path)
    save_file(packed, tmp_path / "model.safetensors", {"format": "pt"})
    change(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert logits(tmp_path).equal(expected)
    weight = load_weights(tmp_path, read_config(tmp_path))["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert weight.format.name == "MXFP4"
    save_file({**packed, f"{name}_scales": scales[:, :, :0]}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="has no scales of its shape"):
        load_weights(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("gemma4-e", "Gemma4ForConditionalGeneration"),
        ("mistral", "Mistral3ForConditionalGeneration"),
    ],
)
def test_the_text_part_of_a_model_of_images_is_read_alone(name: str, architecture: str, tmp_path: Path) -> None:
    save_random(name, tmp_path)
    expected, said = logits(tmp_path), json.loads((tmp_path / "config.json").read_text())
    tensors = {f"language_model.{key}": tensor for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file({**tensors, "vision_tower.patch.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    whole = {"architectures": [architecture], "text_config": said, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert logits(tmp_path).equal(expected)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"logit_scale": 0.5}, "logit_scale 0.5 is not supported"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm True"),
        ("llama", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, r"rope_parameters\.llama_4_scaling_beta 0\.1"),
        ("llama", {"num_local_experts": 4}, "num_local_experts 4"),
        ("llama", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar 64"),
        ("qwen2", {"query_pre_attn_scalar": 1}, "query_pre_attn_scalar 1 "),
        ("llama", {"attn_logit_softcapping": 1.0}, r"attn_logit_softcapping 1\.0"),
        ("llama", {"residual_multiplier": 0}, "residual_multiplier 0"),
        ("llama", {"is_causal": False}, "bidirectional attention"),
        ("qwen3", {"kv_lora_rank": 8}, "kv_lora_rank 8"),
        ("gemma3", {"num_kv_shared_layers": 2}, "num_kv_shared_layers 2"),
        ("gemma4-e", {"vocab_size_per_layer_input": 70}, "vocab_size_per_layer_input 70 beside a vocab_size of 64"),
        ("gemma4-dense", {"per_layer_config": {"0": {"sliding_window": 2}}}, "per_layer_config with sliding_window"),
        ("gemma4-dense", {"per_layer_config": {"0": {"head_dim": 8}}}, "layers of one type that differ in their heads"),
        ("gemma4-dense", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4-dense", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "scaled by 'yarn'"),
        ("gemma4-dense", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "'proportional'"),
        ("qwen3", {"attention_sink_size": 4}, "attention_sink_size 4"),
        ("gemma3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("granite", {"architectures": ["MambaForCausalLM"]}, "layers are recurrent"),
        ("granite4", {"layer_types": ["attention", "mamba"]}, "some of its layers are recurrent"),
        ("granite", {"architectures": ["NeverHeardOf"]}, "parlay models --families"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4' can't be read"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported: 7.0 is"),
    ],
)
def test_what_would_change_the_arithmetic_unnoticed_is_refused_by_name(
    name: str, changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    save_random(name, tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


IDLE = {
    *("use_cache", "initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"),
    *("output_router_logits", "router_aux_loss_coef", "pretraining_tp", "transformers_version", "torch_dtype"),
    *("return_dict", "output_hidden_states", "chunk_size_feed_forward", "problem_type", "_name_or_path", "id2label"),
    *("label2id", "is_encoder_decoder", "bos_token_id", "pad_token_id", "model_type", "output_attentions", "dtype"),
    *("architectures", "residual_dropout", "_sliding_window_pattern", "time_step_limit"),
}
"""Keys that change nothing while a model writes text, or not in models without layers of Mamba."""


def changed(value: object) -> object:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return [*reversed(value)] if isinstance(value, list) else {"other": 3} if isinstance(value, dict) else 3


@pytest.mark.parametrize("name", [*FAMILIES, *NATIVE])
def test_no_key_that_transformers_knows_for_a_family_goes_unnoticed(name: str, tmp_path: Path) -> None:
    """A change of any of them changes the decoder, is refused, or says nothing beside others that the family reads."""
    model = random_model(name)
    model.config.save_pretrained(tmp_path)
    change(tmp_path, architectures=[type(model).__name__])
    said = json.loads((tmp_path / "config.json").read_text())
    usual, unnoticed = read_config(tmp_path), []
    for key in {**model.config.to_dict(), **said}.keys() - IDLE:
        change(tmp_path, **{**said, key: changed(said.get(key))})
        try:
            unnoticed += [key] if read_config(tmp_path) == usual else []
        except ParlayError:
            continue
    assert {*unnoticed} <= {*FAMILY_OF[usual.architecture].keys, *reading._READ, "intermediate_size"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"num_experts_per_tok": 7}),
        ("mixtral", {"num_experts_per_tok": 0}),
        ("qwen3-moe", {"moe_intermediate_size": 0}),
        ("qwen3-moe", {"num_local_experts": 9_999, "num_hidden_layers": 99}),
        ("granite", {"residual_multiplier": 0.0}),
        ("granite", {"logits_scaling": 0.0}),
        ("gemma2", {"query_pre_attn_scalar": -1}),
        ("phi4-mini", {"partial_rotary_factor": 1.75, "rope_parameters": {"rope_type": "default"}}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("gemma4-e", {"num_kv_shared_layers": 6}),
        ("gemma4-e", {"num_kv_shared_layers": 5}),
        ("gemma4-e", {"sliding_window": 0}),
        ("gemma4-e", {"per_layer_config": {"1": {"head_dim": 1 << 40}}}),
        ("gemma4-e", {"per_layer_config": {"9": {"head_dim": 8}}}),
        ("gemma4-e", {"hidden_size_per_layer_input": -2}),
    ],
)
def test_numbers_of_layers_without_sense_are_one_line(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    save_random(name, tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ParlayError, match=r"config\.json(: [\w ]+ must be| can't be read)") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_heads_of_full_layers_are_read_from_each_of_their_two_places(tmp_path: Path) -> None:
    """As their makers name them, and layer by layer as transformers writes them."""
    save_random("gemma4-dense", tmp_path)
    listed, said = read_config(tmp_path), json.loads((tmp_path / "config.json").read_text())
    del said["per_layer_config"]
    named = {**said, "global_head_dim": 24, "num_global_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(named))
    assert read_config(tmp_path) == listed
    change(tmp_path, attention_k_eq_v=False)
    assert read_config(tmp_path).forms[-1].kv_heads == 4


def test_keys_of_layers_that_see_others_may_lie_in_the_files(tmp_path: Path) -> None:
    save_random("gemma4-e", tmp_path)
    expected, tensors = logits(tmp_path), load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.self_attn.k_proj.weight"] = torch.ones(32, 32)
    tensors["model.layers.4.self_attn.k_norm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert logits(tmp_path).equal(expected)


def test_layers_that_differ_are_not_shared_out_among_ranks(tmp_path: Path) -> None:
    save_random("gemma4-e", tmp_path)
    with pytest.raises(ParlayError, match="can't be shared out among ranks; run it on one"):
        Layout(tensor=2).check("it", read_config(tmp_path))


def test_layers_alike_that_differ_from_the_model_are_uneven_too(tmp_path: Path) -> None:
    """So no rank takes the model's sizes for theirs."""
    save_random("llama", tmp_path)
    config = read_config(tmp_path)
    own = replace(config.llama, kv_heads=1, head_dim=2 * config.head_dim)
    assert not config.is_uneven
    assert replace(config, layers=(own,) * config.num_layers).is_uneven


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    save_random("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"1 missing: model\.layers\.1\.mlp\.experts\.4\.up_proj"):
        load_weights(tmp_path, read_config(tmp_path))


def test_a_plan_for_a_mixture_of_experts_is_refused_in_one_line(tmp_path: Path) -> None:
    save_random("mixtral", tmp_path)
    with pytest.raises(UnsupportedModel, match="the cost of this mixture of experts"):
        shape_of(read_config(tmp_path), weight_bytes=2, kv_bytes=2)


def test_the_layer_for_tokens_to_come_is_left_out(tmp_path: Path) -> None:
    save_random("glm4-moe", tmp_path)
    expected = logits(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    change(tmp_path, num_nextn_predict_layers=1)
    assert logits(tmp_path).equal(expected)
