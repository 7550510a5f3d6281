"""Gemma 2: norms before and after each half of a layer, capped scores and logits, a window in every second layer."""

from __future__ import annotations

from dataclasses import replace

from parlay.models.config import DecoderConfig, Json, LayerForm
from parlay.models.families.family import Family, windows_by_type, with_layers


def _gemma2(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    form = replace(
        usual,
        post_norms=True,
        scale=float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        score_cap=float(raw.get("attn_logit_softcapping", 50.0) or 0),
    )
    slide = [layer % 2 == 0 for layer in range(config.num_layers)]
    layered = with_layers(config, form, windows_by_type(raw, config, raw.get("sliding_window", 4096), slide))
    logit_cap = float(raw.get("final_logit_softcapping", 30.0) or 0)
    return replace(layered, embedding_scale=config.hidden_size**0.5, logit_cap=logit_cap)


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    max_context=8192,
    head_dim=256,
    tie_embeddings=True,
    activation="gelu_pytorch_tanh",
    complete=_gemma2,
    names={
        "post_attention_layernorm": "attention_out_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "mlp_out_layernorm",
    },
    norm_offset=1.0,
)
