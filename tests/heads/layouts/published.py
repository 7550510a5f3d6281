"""Small heads as others publish them: files by the names and shapes of the published code, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from parlay.models.config import DecoderConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
    "num_hidden_layers": 1,
}


def layer_config(target: DecoderConfig) -> dict[str, Any]:
    """Of one decoder layer for this target, with sizes of its own."""
    return {
        **LLAMA,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
    }


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape) * shape[-1] ** -0.5


def vector(size: int) -> Tensor:
    return 1 + 0.2 * torch.randn(size)


def attention(config: Mapping[str, Any], inputs: int, at: str) -> dict[str, Tensor]:
    query, key = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        f"{at}self_attn.q_proj.weight": matrix(query, inputs),
        f"{at}self_attn.k_proj.weight": matrix(key, inputs),
        f"{at}self_attn.v_proj.weight": matrix(key, inputs),
        f"{at}self_attn.o_proj.weight": matrix(config["hidden_size"], query),
    }


def feed_forward(config: Mapping[str, Any], at: str) -> dict[str, Tensor]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    return {
        f"{at}mlp.gate_proj.weight": matrix(inner, size),
        f"{at}mlp.up_proj.weight": matrix(inner, size),
        f"{at}mlp.down_proj.weight": matrix(size, inner),
        f"{at}post_attention_layernorm.weight": vector(size),
    }


def write(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def draft_vocab(target: DecoderConfig, size: int) -> dict[str, Tensor]:
    """Every second token."""
    known_V = torch.zeros(target.vocab_size, dtype=torch.bool)
    known_V[2 * torch.arange(size)] = True
    return {"d2t": torch.arange(size), "t2d": known_V}


def eagle3(target: DecoderConfig, layer: str = "midlayer.") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As SafeAILab does; vLLM and SpecForge call the layer otherwise."""
    size, config = target.hidden_size, {**layer_config(target), "draft_vocab_size": 24}
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    tensors = {
        "fc.weight": matrix(size, 3 * size),
        f"{layer}hidden_norm.weight": vector(size),
        f"{layer}input_layernorm.weight": vector(size),
        **attention(config, 2 * size, layer),
        **feed_forward(config, layer),
        "norm.weight": vector(size),
        "lm_head.weight": matrix(24, size),
        **draft_vocab(target, 24),
    }
    return config, tensors


def eagle(target: DecoderConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size, config = target.hidden_size, layer_config(target)
    tensors = {
        "fc.weight": matrix(size, 2 * size),
        "fc.bias": torch.randn(size),
        **attention(config, size, "layers.0."),
        **feed_forward(config, "layers.0."),
    }
    return config, tensors
