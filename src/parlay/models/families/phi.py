"""Phi-3 and Phi-4: fused projections; the small ones rotate a part of each head and scale long positions (longrope)."""

from __future__ import annotations

from parlay.models.config import DecoderConfig, Json, LayerForm
from parlay.models.families.family import Family, GgufForm, with_layers


def _phi3(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    return with_layers(config, usual, [raw.get("sliding_window") or None] * config.num_layers)


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    max_context=4096,
    rms_norm_eps=1e-5,
    complete=_phi3,
    keys=("original_max_position_embeddings",),
    gguf=GgufForm(
        "phi3",
        keys={"attention.sliding_window": "sliding_window"},
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    note="longrope: mostly up to 4,096 tokens; a larger --max-model-len computes all texts as long ones",
)
