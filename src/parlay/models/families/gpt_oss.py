"""gpt-oss: experts with biases and a clamped activation, attention sinks, and a window in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from parlay.models.config import DecoderConfig, Experts, Json, LayerForm, UnsupportedModel
from parlay.models.families.family import Family, GgufForm, windows_by_type, with_layers

if TYPE_CHECKING:
    from torch import Tensor

    from parlay.models.weights.shapes import Weight


_ACTIVATION = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _gpt_oss(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """Raises UnsupportedModel if the activation's constants differ from gpt-oss's."""
    for key, usual_value in _ACTIVATION.items():
        if raw.get(key, usual_value) != usual_value:
            raise UnsupportedModel(f"{config.architecture}: {key} {raw[key]!r:.40} is not supported: {usual_value} is")
    experts = Experts(
        count=int(raw.get("num_local_experts", 128)),
        chosen=int(raw.get("num_experts_per_tok", 4)),
        size=config.intermediate_size,
        bias=True,
    )
    form = replace(usual, sinks=True, activation="clamped_swiglu", experts=experts)
    slide = [layer % 2 == 0 for layer in range(config.num_layers)]
    return with_layers(config, form, windows_by_type(raw, config, raw.get("sliding_window", 128), slide))


def _regroup(tensors: Mapping[str, Tensor]) -> Mapping[str, Weight]:
    from parlay.models.weights.regrouped import gpt_oss

    return gpt_oss(tensors)


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    models="gpt-oss",
    max_context=131_072,
    head_dim=64,
    attention_bias=True,
    rope_theta=150_000.0,
    rms_norm_eps=1e-5,
    complete=_gpt_oss,
    keys=("num_local_experts", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit", "max_position_embeddings"),
    names={"self_attn.sinks": "self_attn.sinks.weight", "mlp.router.": "mlp.gate."},
    regroup=_regroup,
    quantized=("mxfp4",),
    gguf=GgufForm(
        "gpt-oss",
        keys={
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        names={"post_attention_norm": "post_attention_layernorm"},
        truncate=False,
    ),
)
