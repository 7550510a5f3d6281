"""GGUF files as llama.cpp's converter writes them, made of the weights of a checkpoint in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.loading import load_tensors, read_config
from tests.models.gguf_files import NAMES, add, finish, pairs

Json = Mapping[str, Any]
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    **_WINDOW,
}
_CHOSEN = {"expert_used_count": "num_experts_per_tok"}
_LOCAL = {"expert_count": "num_local_experts", **_CHOSEN}
_QWEN = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size", **_CHOSEN}
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
ARCHITECTURES: Mapping[str, tuple[str, Json]] = {
    "GemmaForCausalLM": ("gemma", {}),
    "Gemma2ForCausalLM": ("gemma2", _CAPS),
    "Gemma3ForCausalLM": ("gemma3", {**_WINDOW, "attention.sliding_window_pattern": "_sliding_window_pattern"}),
    "Phi3ForCausalLM": ("phi3", _WINDOW),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "Olmo3ForCausalLM": ("olmo2", {**_WINDOW, "rope.freq_base_swa": "rope_local_base_freq"}),
    "SmolLM3ForCausalLM": ("smollm3", {}),
    "GraniteForCausalLM": ("granite", _SCALES),
    "GraniteMoeForCausalLM": ("granitemoe", {**_SCALES, **_LOCAL}),
    "GraniteMoeSharedForCausalLM": (
        "granitemoe",
        {**_SCALES, **_LOCAL, "expert_shared_feed_forward_length": "shared_intermediate_size"},
    ),
    "LlamaForCausalLM": ("llama", {}),
    "MixtralForCausalLM": ("llama", _LOCAL),
    "Qwen2MoeForCausalLM": (
        "qwen2moe",
        {**_QWEN, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "Qwen3MoeForCausalLM": ("qwen3moe", _QWEN),
    "Glm4ForCausalLM": ("glm4", {}),
    "Ernie4_5ForCausalLM": ("ernie4_5", {}),
    "Gemma4ForCausalLM": (
        "gemma4",
        {
            **_WINDOW,
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
    ),
    "GptOssForCausalLM": ("gpt-oss", {**_WINDOW, **_LOCAL, "expert_feed_forward_length": "intermediate_size"}),
}
"""Names in files, and keys of theirs with the words of config.json."""
_PAIRED = ("llama", "smollm3", "granite", "granitemoe", "glm4", "ernie4_5")
_STEMS = {
    **NAMES,
    "attention_out_layernorm": "post_attention_norm",
    "mlp_out_layernorm": "post_ffw_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.qkv_proj": "attn_qkv",
    "layer_scalar": "layer_output_scale",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "per_layer_out_layernorm": "post_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "experts_layernorm": "pre_ffw_norm_2",
    "dense_out_layernorm": "post_ffw_norm_1",
    "experts_out_layernorm": "post_ffw_norm_2",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}


_SCALES = {"router_layernorm": "ffn_gate_inp", "mlp.expert_scale": "ffn_down_exps"}


def write(path: Path, checkpoint: Path) -> Path:
    """Write ``checkpoint`` as a GGUF file of plain numbers."""
    raw, config = json.loads((checkpoint / "config.json").read_text()), read_config(checkpoint)
    raw = {"num_experts": raw.get("num_local_experts"), **raw}
    name, own = ARCHITECTURES[config.architecture]
    writer = gguf.GGUFWriter(path, name)
    for key, value in {**_keys(raw, config), **{key: raw[word] for key, word in own.items() if raw.get(word)}}.items():
        add(writer, f"{name}.{key}", float(value) if key.endswith(("_scale", ".scale", "softcapping")) else value)
    for stem, tensor in _tensors(name, raw, config, load_tensors(checkpoint, config)).items():
        writer.add_tensor(stem, tensor.float().contiguous().numpy())
    finish(writer)
    return path


def _keys(raw: Json, config: DecoderConfig) -> dict[str, Any]:
    rope = raw["rope_parameters"]
    full = rope.get("full_attention", rope)
    said = {
        "block_count": config.num_layers,
        "context_length": raw["max_position_embeddings"],
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(full["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if raw.get("head_dim"):
        said |= {"attention.key_length": raw["head_dim"], "attention.value_length": raw["head_dim"]}
    if config.architecture == "Gemma4ForCausalLM":
        said |= _of_gemma4(config)
    if config.rope.rotated:
        said["rope.dimension_count"] = config.rope.rotated
    if full["rope_type"] == "yarn":
        said |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": full["factor"],
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        }
    if full["rope_type"] == "longrope":
        said |= {
            "rope.scaling.original_context_length": raw["original_max_position_embeddings"],
            "rope.scaling.attn_factor": config.rope.attention_factor,
        }
    if config.architecture == "Olmo3ForCausalLM":
        said["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in raw["layer_types"]]
    return said


def _of_gemma4(config: DecoderConfig) -> dict[str, Any]:
    forms = config.forms
    full = config.heads_of(forms[-1]).size
    return {
        "attention.head_count_kv": [config.heads_of(form).heads for form in forms],
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.shared_kv_layers": sum(form.keys_of is not None for form in forms),
        "attention.sliding_window_pattern": [form.window is not None for form in forms],
        "embedding_length_per_layer_input": config.per_layer_size,
        "feed_forward_length": [config.mlp_size_of(form) for form in forms],
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": config.rope.theta,
    }


def _tensors(name: str, raw: Json, config: DecoderConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if name in _PAIRED:
        rotated = config.rope.rotated or config.head_dim
        weights = {key: paired(w, config.head_dim, rotated) if _turns(key) else w for key, w in weights.items()}
    if name == "phi3":
        weights = _fused(weights, "self_attn.qkv_proj", [f"self_attn.{part}_proj" for part in "qkv"])
    if name in ("phi3", "glm4"):
        weights = _fused(weights, "mlp.up_proj", ["mlp.gate_proj", "mlp.up_proj"])
    found = {_name(key, name): tensor for key, tensor in _stacked(weights).items()}
    if name == "gemma4":
        rope = config.forms[-1].rope
        assert rope is not None
        found["rope_freqs.weight"] = torch.tensor(rope.divisors)
    for kind in ("short", "long"):
        if f"{kind}_factor" in raw["rope_parameters"]:
            found[f"rope_factors_{kind}.weight"] = torch.tensor(raw["rope_parameters"][f"{kind}_factor"])
    return found


def paired(rows: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Rows whose first ``rotated`` of each head lie in halves, with these in pairs."""
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    turning = pairs(heads[:, :rotated].flatten(0, 1), rotated).view(len(heads), rotated, *rows.shape[1:])
    return torch.cat((turning, heads[:, rotated:]), 1).view(rows.shape)


def _turns(key: str) -> bool:
    return "q_proj" in key or "k_proj" in key


def _fused(weights: Mapping[str, Tensor], fused: str, parts: list[str]) -> dict[str, Tensor]:
    """Return the weights with these matrices of each layer joined to one, under the name of the last."""
    found = dict(weights)
    for key in [key for key in weights if parts[0] in key]:
        found[key.replace(parts[0], fused)] = torch.cat([found.pop(key.replace(parts[0], part)) for part in parts])
    return found


def _stacked(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for key, tensor in weights.items():
        match = re.fullmatch(r"(.*\.experts)\.\d+(\..*)", key)
        if match:
            experts.setdefault(match[1] + match[2], []).append(tensor)
        else:
            found[key] = tensor[0] if key.endswith("shared_expert_gate.weight") else tensor
    return found | {key: torch.stack(tensors) for key, tensors in experts.items()}


def _name(key: str, architecture: str) -> str:
    base, _, kind = key.rpartition(".")
    if base in _STEMS:
        return f"{_STEMS[base]}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    if rest in _SCALES:
        return f"blk.{layer}.{_SCALES[rest]}.scale"
    stem = _STEMS[rest]
    if architecture == "gpt-oss" and rest == "post_attention_layernorm":
        stem = "post_attention_norm"
    return f"blk.{layer}.{stem}.{kind}"
