"""Tiny diffusion checkpoints with random weights, in the layouts of published models, and a slow reference for each.

transformers has none of these models, so the layouts follow the models' papers and configs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

from parlay.models.config import Experts
from parlay.testing.slow_diffusion import (
    DIM,
    EXPERTS,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    MASK,
    VOCAB,
    Layout,
    SlowDiffusion,
)
from parlay.testing.toy_tokenizers import toy_tokenizer

__all__ = ["LAYOUTS", "MASK", "VOCAB", "SlowDiffusion", "save_diffusion"]

_QWEN = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_LLADA = {
    "d_model": HIDDEN,
    "mlp_hidden_size": INNER,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "embedding_size": VOCAB,
    "max_sequence_length": 256,
    "rope": True,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "activation_type": "silu",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "weight_tying": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "multi_query_attention": None,
    "eos_token_id": 2,
}
_QWEN_NAMES = {
    "embed": "model.embed_tokens",
    "final": "model.norm",
    "head": "lm_head",
    "norm1": "model.layers.{}.input_layernorm",
    "norm2": "model.layers.{}.post_attention_layernorm",
    **{name: f"model.layers.{{}}.self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"model.layers.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")},
    **{f"{name}_norm": f"model.layers.{{}}.self_attn.{name}_norm" for name in "qk"},
}
_CHOSEN = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
_EXPERT_NAMES = {
    "router": "model.layers.{}.mlp.gate",
    **{part: f"model.layers.{{}}.mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
_LLADA2_NAMES = {
    **_QWEN_NAMES,
    **_EXPERT_NAMES,
    "embed": "model.word_embeddings",
    "qkv": "model.layers.{}.attention.query_key_value",
    "o": "model.layers.{}.attention.dense",
    "q_norm": "model.layers.{}.attention.query_layernorm",
    "k_norm": "model.layers.{}.attention.key_layernorm",
    **{f"shared_{part}": f"model.layers.{{}}.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_LLADA_NAMES = {
    "embed": "model.transformer.wte",
    "final": "model.transformer.ln_f",
    "head": "model.transformer.ff_out",
    "norm1": "model.transformer.blocks.{}.attn_norm",
    "norm2": "model.transformer.blocks.{}.ff_norm",
    **{name: f"model.transformer.blocks.{{}}.{name}_proj" for name in "qkv"},
    "o": "model.transformer.blocks.{}.attn_out",
    "gate": "model.transformer.blocks.{}.ff_proj",
    "up": "model.transformer.blocks.{}.up_proj",
    "down": "model.transformer.blocks.{}.ff_out",
}


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "llada": Layout(architecture="LLaDAModelLM", config={**_LLADA, "model_type": "llada"}, names=_LLADA_NAMES),
        "dream": Layout(
            architecture="DreamModel",
            config={**_QWEN, "model_type": "Dream"},
            names=_QWEN_NAMES,
            shift=True,
            bias=True,
        ),
        "fast-dllm": Layout(
            architecture="Fast_dLLM_QwenForCausalLM",
            config={**_QWEN, "model_type": "Fast_dLLM_Qwen", "bd_size": 8},
            names=_QWEN_NAMES,
            block=8,
            shift=True,
            bias=True,
        ),
        "fast-dllm-32": Layout(
            architecture="Fast_dLLM_QwenForCausalLM",
            config={**_QWEN, "model_type": "Fast_dLLM_Qwen"},
            names=_QWEN_NAMES,
            block=32,
            shift=True,
            bias=True,
        ),
        "sdar": Layout(
            architecture="SDARForCausalLM",
            config={**_QWEN, "model_type": "sdar", "head_dim": DIM},
            names=_QWEN_NAMES,
            block=4,
            qk_norm=True,
        ),
        "sdar-moe": Layout(
            architecture="SDARMoeForCausalLM",
            config={**_QWEN, "model_type": "sdar_moe", "head_dim": DIM, **_CHOSEN, "norm_topk_prob": True},
            names={**_QWEN_NAMES, **_EXPERT_NAMES},
            block=4,
            qk_norm=True,
            experts=Experts(count=EXPERTS, chosen=2, size=INNER),
        ),
        "llada-moe": Layout(
            architecture="LLaDAMoEModelLM",
            config={
                **{name: value for name, value in _QWEN.items() if name != "intermediate_size"},
                "model_type": "llada",
                "dense_intermediate_size": INNER,
                "expert_intermediate_size": INNER,
                "num_experts": EXPERTS,
                "num_experts_per_tok": 2,
                "norm_topk_prob": None,
                "qk_layernorm": True,
            },
            names={**_QWEN_NAMES, **_EXPERT_NAMES},
            qk_norm=True,
            experts=Experts(count=EXPERTS, chosen=2, size=INNER, normalized=False),
        ),
        "llada2": Layout(
            architecture="LLaDA2MoeModelLM",
            config={
                **_QWEN,
                "model_type": "llada2_moe",
                "head_dim": DIM,
                **_CHOSEN,
                "first_k_dense_replace": 0,
                "num_shared_experts": 1,
                "n_group": 3,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "block_size": 4,
                "partial_rotary_factor": 0.5,
                "score_function": "sigmoid",
                "use_qk_norm": True,
            },
            names=_LLADA2_NAMES,
            block=4,
            qk_norm=True,
            rotated=DIM // 2,
            experts=Experts(
                count=EXPERTS, chosen=2, size=INNER, shared=INNER, scale=2.5, sigmoid=True, groups=3, top_groups=2
            ),
        ),
        "nemotron": Layout(
            architecture="NemotronLabsDiffusionModel",
            config={
                **_QWEN,
                "model_type": "nemotron_labs_diffusion",
                "head_dim": DIM,
                "block_size": 8,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 128,
                },
            },
            names={
                part: "diffusion_head" if part == "head" else name.replace("model.", "encoder.")
                for part, name in _QWEN_NAMES.items()
            },
            canvas=8,
        ),
        "wedlm": Layout(
            architecture="WeDLMForCausalLM",
            config={**_QWEN, "model_type": "wedlm", "attention_bias": True, "qk_norm": False},
            names=_QWEN_NAMES,
            bias=True,
            canvas=16,
            ordered=True,
        ),
        "wedlm-qwen3": Layout(
            architecture="WeDLMForCausalLM",
            config={
                **_QWEN,
                "model_type": "wedlm",
                "head_dim": DIM,
                "attention_bias": False,
                "qk_norm": True,
                "wedlm_window_size": 8,
            },
            names=_QWEN_NAMES,
            qk_norm=True,
            canvas=8,
            ordered=True,
        ),
        "a2d": Layout(
            architecture="A2DQwen3LMHeadModel",
            config={**_QWEN, "model_type": "a2d-qwen3", "head_dim": DIM},
            names=_QWEN_NAMES,
            qk_norm=True,
        ),
    }
)


def save_diffusion(name: str, directory: Path, *, seed: int = 0, vocab: int = VOCAB) -> SlowDiffusion:
    """Write a random checkpoint of this layout into ``directory``, and return its slow reference.

    The mask is the fourth token from the end. With another ``vocab`` than `VOCAB`, only the reference's `logits` can be
    used.
    """
    layout, draw = LAYOUTS[name], torch.Generator().manual_seed(seed)
    weights = {
        file_name: torch.randn(shape, generator=draw) * (2 * shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        + (1 if "norm" in key or key == "final" else 0)
        for key, file_name, shape in _shapes(layout, vocab)
    }
    directory.mkdir(parents=True, exist_ok=True)
    config = {**layout.config, "architectures": [layout.architecture], "dtype": "float32", "mask_token_id": vocab - 4}
    config |= {name: vocab for name in ("vocab_size", "embedding_size") if name in config}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    toy_tokenizer(vocab).save_pretrained(directory)
    return SlowDiffusion(layout, weights)


def _shapes(layout: Layout, vocab: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the part, the name in the file, and the shape of each weight."""
    whole = {"embed": (vocab, HIDDEN), "final": (HIDDEN,), "head": (vocab, HIDDEN)}
    query, key = HEADS * DIM, KV_HEADS * DIM
    layer: dict[str, tuple[int, ...]] = {
        "norm1": (HIDDEN,), "norm2": (HIDDEN,), "q": (query, HIDDEN), "k": (key, HIDDEN), "v": (key, HIDDEN),
        "o": (HIDDEN, query),
    }  # fmt: skip
    gated: dict[str, tuple[int, ...]] = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    if "qkv" in layout.names:
        layer = {part: shape for part, shape in layer.items() if part not in "qkv"} | {"qkv": (query + 2 * key, HIDDEN)}
    if layout.experts is None:
        layer |= gated
    else:
        layer["router"] = (EXPERTS, HIDDEN)
    if layout.experts is not None and layout.experts.shared:
        layer |= {f"shared_{part}": shape for part, shape in gated.items()}
    if layout.qk_norm:
        layer |= {"q_norm": (DIM,), "k_norm": (DIM,)}
    found = [(part, f"{layout.names[part]}.weight", shape) for part, shape in whole.items()]
    for number in range(LAYERS):
        for part, shape in layer.items():
            found.append((part, f"{layout.names[part].format(number)}.weight", shape))
            if layout.bias and part in "qkv":
                found.append((part, f"{layout.names[part].format(number)}.bias", shape[:1]))
        for expert in range(EXPERTS if layout.experts is not None else 0):
            found += [
                (part, f"{layout.names[part].format(number, expert)}.weight", shape) for part, shape in gated.items()
            ]
        if layout.experts is not None and layout.experts.sigmoid:
            found.append(("choice", f"{layout.names['router'].format(number)}.expert_bias", (EXPERTS,)))
    return found
