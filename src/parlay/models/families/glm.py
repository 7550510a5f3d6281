"""GLM-4: positions turn neighbours in the first half of each head; the newer models norm what each half gives, too."""

from __future__ import annotations

from dataclasses import replace

from parlay.models.config import DecoderConfig, Json, LayerForm
from parlay.models.families.family import Family, GgufForm, with_layers


def _glm(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """Give biases to the products that lead into attention, and none to the one that leads out."""
    return with_layers(config, replace(usual, out_bias=False), [None] * config.num_layers)


def _glm4(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    return _glm(raw, config, replace(usual, post_norms=True))


GLM = Family(
    architecture="GlmForCausalLM",
    models="GLM-4 9B Chat",
    max_context=131_072,
    head_dim=128,
    attention_bias=True,
    rotated=0.5,
    interleaved=True,
    complete=_glm,
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    models="GLM-4-0414 9B and 32B",
    complete=_glm4,
    names={
        "post_self_attn_layernorm": "attention_out_layernorm",
        "post_mlp_layernorm": "mlp_out_layernorm",
    },
    gguf=GgufForm("glm4", interleaved=True, names={"ffn_up": "mlp.gate_up_proj"}),
)
