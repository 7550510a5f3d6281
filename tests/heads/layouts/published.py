"""Small heads in published layouts: files with the names and shapes of the published code."""

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
    """Return the config of one decoder layer for this target, with sizes of its own."""
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
    """Return config and tensors with SafeAILab's names; vLLM and SpecForge name the layer differently."""
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


def speculator(kind: str, layer: Mapping[str, Any], **said: object) -> dict[str, Any]:
    """The config that the package speculators writes."""
    return {
        "speculators_model_type": kind,
        "architectures": [kind],
        "transformer_layer_config": dict(layer),
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "someone/toy", "architectures": ["LlamaForCausalLM"]},
        },
        **said,
    }


def speculators_eagle3(target: DecoderConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = eagle3(target, "layers.0.")
    taps, size = config.pop("eagle_aux_hidden_state_layer_ids"), config.pop("draft_vocab_size")
    said = {"draft_vocab_size": size, "eagle_aux_hidden_state_layer_ids": taps, "norm_before_residual": True}
    return speculator("eagle3", config, **said), tensors


def peagle(target: DecoderConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = speculators_eagle3(target)
    layer = {**config["transformer_layer_config"], "num_hidden_layers": 2}
    more = {
        "mask_hidden": torch.randn(1, 1, 3 * target.hidden_size),
        "layers.1.input_layernorm.weight": vector(target.hidden_size),
        **attention(layer, target.hidden_size, "layers.1."),
        **feed_forward(layer, "layers.1."),
    }
    said = {**config, "norm_before_residual": False, "mask_token_id": target.vocab_size - 1}
    return {**said, **speculator("peagle", layer)}, {**tensors, **more}


def speculators_mtp(target: DecoderConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size, at = target.hidden_size, "mtp_layers.0."
    layer = {**layer_config(target), "model_type": "qwen3", "num_hidden_layers": target.num_layers}
    tensors = {
        **{f"{at}{name}_layernorm.weight": vector(size) for name in ("hidden", "token", "final", "input")},
        f"{at}input_proj.weight": matrix(size, 2 * size),
        f"{at}self_attn.q_norm.weight": vector(16),
        f"{at}self_attn.k_norm.weight": vector(16),
        **attention(layer, size, at),
        **feed_forward(layer, at),
    }
    return speculator("mtp", layer, num_nextn_predict_layers=1), tensors


def deepseek_mtp(target: DecoderConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a model whose files hold the head, too."""
    size, at = target.hidden_size, f"model.layers.{target.num_layers}."
    config = {**layer_config(target), "num_hidden_layers": target.num_layers, "num_nextn_predict_layers": 1}
    tensors = {
        "model.layers.0.input_layernorm.weight": vector(size),
        "model.embed_tokens.weight": matrix(target.vocab_size, size),
        **{f"{at}{name}.weight": vector(size) for name in ("enorm", "hnorm", "input_layernorm", "shared_head.norm")},
        f"{at}eh_proj.weight": matrix(size, 2 * size),
        f"{at}shared_head.head.weight": matrix(target.vocab_size, size),
        **attention(config, size, at),
        **feed_forward(config, at),
    }
    return config, tensors


def medusa(target: DecoderConfig, heads: int = 2) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size = target.hidden_size
    config = {"model_type": "medusa", "hidden_size": size, "vocab_size": target.vocab_size, "num_heads": heads}
    tensors = {f"blocks.{head}.layers.0.weight": matrix(size, size) for head in range(heads)}
    tensors |= {f"lm_heads.{head}.weight": matrix(target.vocab_size, size) for head in range(heads)}
    return {**config, "num_hidden_layers": 1, "architectures": ["MedusaModel"]}, tensors


def numbered_medusa(target: DecoderConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors with the names of the paper's code, converted from its pickle."""
    _, tensors = medusa(target)
    found = {}
    for head in range(2):
        found[f"{head}.0.linear.weight"] = tensors[f"blocks.{head}.layers.0.weight"]
        found[f"{head}.0.linear.bias"] = torch.randn(target.hidden_size)
        found[f"{head}.1.weight"] = tensors[f"lm_heads.{head}.weight"]
    return {"base_model_name_or_path": "someone/toy", "medusa_num_heads": 2, "medusa_num_layers": 1}, found


def hydra(target: DecoderConfig, layers: int = 2) -> tuple[dict[str, Any], dict[str, Tensor]]:
    size, heads = target.hidden_size, 2
    tensors = {}
    for head in range(heads):
        for kind in ("linear", "res_connection"):
            tensors[f"hydra_mlp.{head}.0.{kind}.weight"] = matrix(size, (head + 2) * size)
            tensors[f"hydra_mlp.{head}.0.{kind}.bias"] = torch.randn(size)
        repeated = matrix(size, size), torch.randn(size)
        for layer in range(1, layers):
            tensors[f"hydra_mlp.{head}.{layer}.linear.weight"] = repeated[0].clone()
            tensors[f"hydra_mlp.{head}.{layer}.linear.bias"] = repeated[1].clone()
        tensors[f"hydra_lm_head.{head}.weight"] = matrix(target.vocab_size, size)
        tensors[f"hydra_lm_head.{head}.bias"] = torch.randn(target.vocab_size)
    config = {"hydra_num_heads": heads, "hydra_num_layers": layers, "hydra_head_arch": "mlp", "grounded_heads": True}
    return {**config, "hidden_state_offset": 0, "base_model_name_or_path": "someone/toy"}, tensors


def mlp_speculator(
    target: DecoderConfig, *, tied: bool = False, scaled: bool = True, steps: int = 3
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Files with tied weights hold each matrix once."""
    size, inner = target.hidden_size, 40
    tensors: dict[str, Tensor] = {}
    for step in range(steps):
        if step == 0 or not tied:
            tensors[f"speculator.emb.{step}.weight"] = matrix(target.vocab_size, inner)
            tensors[f"speculator.ln.{step}.weight"] = vector(inner)
            tensors[f"speculator.ln.{step}.bias"] = torch.randn(inner)
            tensors[f"speculator.head.{step}.weight"] = matrix(target.vocab_size, inner)
        if step < 2 or not tied:
            tensors[f"speculator.proj.{step}.weight"] = matrix(inner, inner if step else size)
    config = {"model_type": "mlp_speculator", "emb_dim": size, "inner_dim": inner, "n_predict": steps}
    return {**config, "vocab_size": target.vocab_size, "tie_weights": tied, "scale_input": scaled}, tensors
