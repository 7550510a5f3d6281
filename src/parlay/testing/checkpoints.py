"""Tiny checkpoints with random weights, one per model family, for tests that need a model folder and no download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from parlay.models.loading import load_weights, read_config
from parlay.models.pruning.saving import described, save
from parlay.models.weights.fused import as_tensor

VOCAB_SIZE = 64

_DECODER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GEMMA2 = {**_DECODER, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}

_GEMMA4 = {
    **_DECODER,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 20.0,
}

NATIVE: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", _DECODER),
        "llama-tied": ("llama", {**_DECODER, "tie_word_embeddings": True, "head_dim": 16}),
        "llama-llama3": ("llama", {**_DECODER, "rope_parameters": _LLAMA3_ROPE}),
        "llama-yarn": ("llama", {**_DECODER, "rope_parameters": _YARN_ROPE}),
        "llama-linear": ("llama", {**_DECODER, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        "mistral": ("mistral", {**_DECODER, "sliding_window": None}),
        "mistral-window": ("mistral", {**_DECODER, "sliding_window": 12}),
        "qwen2": ("qwen2", {**_DECODER, "tie_word_embeddings": True}),
        "qwen2-window": (
            "qwen2",
            {**_DECODER, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
        ),
        "qwen3": ("qwen3", {**_DECODER, "head_dim": 16}),
        "gemma2": ("gemma2", _GEMMA2),
    }
)
"""Checkpoints that the native decoder runs: name -> (transformers model type, config values)."""
_FEW = {**_DECODER, "num_hidden_layers": 2}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_ALL_ATTENTION = {**_MAMBA, "layer_types": ["full_attention", "full_attention"]}
_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5], "long_factor": [2.0] * 6}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gemma": ("gemma", {**_FEW, "head_dim": 16}),
        "gemma3": ("gemma3_text", {**_GEMMA2, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
        "gemma4-dense": (
            "gemma4_text",
            {
                **_GEMMA4,
                "num_key_value_heads": 4,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
            },
        ),
        "gemma4-moe": (
            "gemma4_text",
            {
                **_GEMMA4,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 2,
                "moe_intermediate_size": 24,
            },
        ),
        "gemma4-e": (
            "gemma4_text",
            {
                **_GEMMA4,
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 10,
            },
        ),
        "phi3": ("phi3", {**_FEW, "sliding_window": 12}),
        "phi4-mini": (
            "phi3",
            {
                **_FEW,
                "hidden_size": 64,
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 256,
                "partial_rotary_factor": 0.75,
                "rope_scaling": {"rope_type": "longrope", **_FACTORS},
            },
        ),
        "olmo2": ("olmo2", _FEW),
        "olmo3": ("olmo3", {**_DECODER, "num_hidden_layers": 4, "sliding_window": 12}),
        "smollm3": ("smollm3", {**_DECODER, "num_hidden_layers": 4}),
        "granite": (
            "granite",
            {
                **_FEW,
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.25,
                "residual_multiplier": 0.5,
                "logits_scaling": 2.0,
            },
        ),
        "llama-biased": ("llama", {**_FEW, "attention_bias": True}),
        "mixtral": ("mixtral", {**_FEW, **_EXPERTS}),
        "qwen2-moe": ("qwen2_moe", {**_FEW, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 40}),
        "qwen3-moe": ("qwen3_moe", {**_FEW, **_QWEN_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
        "granite-moe": ("granitemoe", {**_FEW, **_EXPERTS, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
        "granite-moe-shared": ("granitemoeshared", {**_FEW, **_EXPERTS, "shared_intermediate_size": 40}),
        "granite4": (
            "granitemoehybrid",
            {
                **_FEW,
                "num_local_experts": 0,
                "shared_intermediate_size": 48,
                "position_embedding_type": "rope",
                "attention_multiplier": 0.3,
                **_ALL_ATTENTION,
            },
        ),
        "granite4-moe": (
            "granitemoehybrid",
            {**_FEW, **_EXPERTS, "shared_intermediate_size": 40, "attention_multiplier": 0.3, **_ALL_ATTENTION},
        ),
        "ernie": ("ernie4_5", {**_FEW, "head_dim": 16}),
        "seed-oss": ("seed_oss", {**_FEW, "head_dim": 16}),
        "exaone4": ("exaone4", {**_FEW, "sliding_window": 12, "sliding_window_pattern": 2}),
        "glm": ("glm", {**_FEW, "head_dim": 16}),
        "glm4": ("glm4", {**_FEW, "head_dim": 16}),
        "glm4-moe": (
            "glm4_moe",
            {
                **_FEW,
                "head_dim": 16,
                "use_qk_norm": True,
                "attention_bias": True,
                "moe_intermediate_size": 24,
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "num_nextn_predict_layers": 0,
            },
        ),
        "gpt-oss": ("gpt_oss", {**_FEW, **_EXPERTS, "head_dim": 16, "sliding_window": 12}),
    }
)
"""Checkpoints of further families that the native decoder runs. Each has every feature in which its family's layers
differ."""

_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FOREIGN: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
        "gpt-neox": ("gpt_neox", {**_DECODER, "num_key_value_heads": None}),
        "gpt-neo": (
            "gpt_neo",
            {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "max_position_embeddings": 256,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 20,
            },
        ),
        "phi-moe": (
            "phimoe",
            {
                **_FEW,
                **_EXPERTS,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10_000.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "short_mscale": 1.1,
                    "long_mscale": 1.3,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
        "gemma2": ("gemma2", _GEMMA2),
        "gemma4": (
            "gemma4_text",
            {
                **_GEMMA2,
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "global_head_dim": 32,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCAB_SIZE,
            },
        ),
        "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
        "lfm2": ("lfm2", {**_DECODER, "layer_types": ["conv", "full_attention", "conv"]}),
        "qwen3.5": ("qwen3_5_text", {**_DECODER, **_DELTA, "num_hidden_layers": 4, "head_dim": 16}),
        "granite-hybrid": (
            "granitemoehybrid",
            {
                **_DECODER,
                **_MAMBA,
                **_EXPERTS,
                "shared_intermediate_size": 16,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            },
        ),
        "falcon-h1": ("falcon_h1", {**_FEW, **_MAMBA, "mamba_d_ssm": 64}),
        "bamba": ("bamba", {**_DECODER, **_MAMBA, "attn_layer_indices": [1]}),
        "qwen3-next": (
            "qwen3_next",
            {
                **_DECODER,
                **_DELTA,
                "num_hidden_layers": 4,
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
            },
        ),
        "recurrent-gemma": (
            "recurrent_gemma",
            {
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "lru_width": 32,
                "attention_window_size": 16,
            },
        ),
        "rwkv": ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}),
    }
)
"""Checkpoints for the adapter that runs transformers' own models, and one (rwkv) that it must refuse."""


_PAIR: Mapping[str, Any] = {"d_model": 32, "decoder_start_token_id": 0, "initializer_factor": 1.0}
_T5: Mapping[str, Any] = {**_PAIR, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
_MARIAN: Mapping[str, Any] = {
    "d_model": 32,
    "decoder_start_token_id": 0,
    "scale_embedding": True,
    "max_position_embeddings": 40,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "activation_function": "swish",
    "forced_eos_token_id": None,
}
PAIRS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "t5": ("t5", {**_T5}),
        "t5-gated": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
        "mt5": ("mt5", {**_T5}),
        "marian": ("marian", {**_MARIAN}),
        "marian-apart": (
            "marian",
            {**_MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCAB_SIZE},
        ),
    }
)
"""Encoder-decoders. Their start token is 0, and Marian has 40 positions."""


def random_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make a tiny transformers model of a family named in NATIVE, FAMILIES, FOREIGN or PAIRS, in eval mode.

    Its weights are large enough that attention, masks and positions show in the logits.
    """
    model_type, values = {**NATIVE, **FAMILIES, **FOREIGN, **PAIRS}[name]
    values = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **values}
    config = AutoConfig.for_model(model_type, **{key: value for key, value in values.items() if value is not None})
    if "sliding_window" in values and values["sliding_window"] is None:
        config.sliding_window = None
    torch.manual_seed(seed)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        for place, buffer in model.named_buffers():
            if place.endswith("layer_scalar"):
                buffer.add_(torch.randn(buffer.shape) * 0.2)
    return model.to(dtype)


def save_random(name: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write `random_model` to ``directory`` as config.json and model.safetensors, and return it."""
    model = random_model(name, seed=seed, dtype=dtype)
    model.save_pretrained(directory)
    return model


def save_dense(file: Path, directory: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file's model into ``directory``.

    Quantized blocks become their values, rounded to bfloat16. Raises ParlayError for a model that is no plain Llama,
    Qwen2 or Qwen3.
    """
    config = read_config(file)
    weights = {name: as_tensor(weight, torch.bfloat16) for name, weight in load_weights(file, config).items()}
    save(directory, described(config, file), weights, source=file)
