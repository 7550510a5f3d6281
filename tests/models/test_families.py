"""Every family computes what transformers computes, from folders and from GGUF files; the rest is refused by name."""

from __future__ import annotations

import json
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
from parlay.models.families.reading import read_config
from parlay.models.loading import load_weights
from parlay.models.torch_ops import eager
from parlay.models.torch_ops.kernels import judge
from parlay.models.weights.shapes import BadCheckpoint
from parlay.options import LoadOptions
from parlay.testing.checkpoints import FAMILIES, VOCAB_SIZE, save_random
from parlay.types import ParlayError, Segment
from tests.models import family_files

FP32 = LoadOptions(dtype="float32", device="cpu")
ROWS = [*(name for name in FAMILIES if name not in ("seed-oss", "exaone4")), "gemma2"]
"""Families that files hold, too."""
TOKENS = torch.randint(VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(model: Path) -> Tensor:
    """``[N, V]``, fed in two chunks so that cached keys matter."""
    runner = models.load(str(model), FP32, cache_tokens=128)
    assert isinstance(runner, NativeRunner)
    runner.open(0, TOKENS)
    assert runner.reserve(0, len(TOKENS))
    first = runner.forward([Segment(0, tuple(TOKENS[:40]))]).logits_RV
    runner.keep(0, ())
    return torch.cat((first, runner.forward([Segment(0, tuple(TOKENS[40:]))]).logits_RV)).float()


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
            monkeypatch.setattr(eager, "judge", lambda *asked: replace(judge(*asked), form=None))
        found = logits(tmp_path)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), kernels
        assert found.argmax(-1).equal(expected.argmax(-1)), kernels


@pytest.mark.parametrize("name", ROWS)
def test_a_gguf_file_computes_the_same(name: str, tmp_path: Path) -> None:
    save_random(name, tmp_path)
    written = family_files.write(tmp_path / "model.gguf", tmp_path)
    torch.testing.assert_close(logits(written), logits(tmp_path), rtol=0, atol=5e-6)


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
    [("gemma3", "Gemma3ForConditionalGeneration"), ("mistral", "Mistral3ForConditionalGeneration")],
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
        ("qwen3", {"attention_sink_size": 4}, "attention_sink_size 4"),
        ("gemma3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("granite", {"architectures": ["MambaForCausalLM"]}, "layers are recurrent"),
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


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mixtral", {"num_experts_per_tok": 7}),
        ("mixtral", {"num_experts_per_tok": 0}),
        ("qwen3-moe", {"moe_intermediate_size": 0}),
        ("qwen3-moe", {"num_local_experts": 9_999, "num_hidden_layers": 99}),
        ("granite", {"residual_multiplier": 0.0}),
        ("granite", {"logits_scaling": 0.0}),
        ("phi4-mini", {"partial_rotary_factor": 1.75, "rope_parameters": {"rope_type": "default"}}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
    ],
)
def test_numbers_of_layers_without_sense_are_one_line(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    save_random(name, tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ParlayError, match=r"config\.json (is no description of a|says)") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    save_random("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"1 missing: model\.layers\.1\.mlp\.experts\.4\.up_proj"):
        load_weights(tmp_path, read_config(tmp_path))


def test_a_plan_for_a_mixture_of_experts_is_refused_in_one_line(tmp_path: Path) -> None:
    save_random("mixtral", tmp_path)
    with pytest.raises(UnsupportedModel, match="no plan for mixtures of experts"):
        shape_of(read_config(tmp_path), weight_bytes=2, kv_bytes=2)
