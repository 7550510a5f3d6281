"""Granite 3: Llama's layers with multipliers of embeddings, scores, residuals and logits; and with experts."""

from __future__ import annotations

from dataclasses import replace

from parlay.models.config import DecoderConfig, Experts, Json, LayerForm
from parlay.models.families.family import Family, GgufForm, with_layers

_OF_FILES = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _granite(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    form = replace(
        usual,
        scale=float(raw.get("attention_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
    )
    return replace(
        with_layers(config, form, [None] * config.num_layers),
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        logit_scale=1 / float(raw.get("logits_scaling", 1.0)),
    )


def _with_experts(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    experts = Experts(
        count=int(raw.get("num_local_experts") or 8),
        chosen=int(raw.get("num_experts_per_tok") or 2),
        size=config.intermediate_size,
        shared=int(raw.get("shared_intermediate_size") or 0),
    )
    return _granite(raw, config, replace(usual, experts=experts))


GRANITE = Family(
    architecture="GraniteForCausalLM",
    models="Granite 3",
    max_context=2048,
    complete=_granite,
    keys=tuple(_OF_FILES.values()),
    gguf=GgufForm("granite", interleaved=True, keys=_OF_FILES),
)
GRANITE_MOE = replace(
    GRANITE,
    architecture="GraniteMoeForCausalLM",
    models="Granite 3 with experts",
    complete=_with_experts,
    keys=(*GRANITE.keys, "num_local_experts", "num_experts_per_tok", "shared_intermediate_size"),
    prefixes={"block_sparse_moe.": "mlp."},
    names={
        "shared_mlp.input_linear": "mlp.shared_expert.gate_up_proj",
        "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
        "mlp.input_linear": "mlp.experts.gate_up_proj",
        "mlp.output_linear": "mlp.experts.down_proj",
        "mlp.router.layer": "mlp.gate",
    },
    gguf=GgufForm(
        "granitemoe",
        interleaved=True,
        keys={
            **_OF_FILES,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
    ),
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    architecture="GraniteMoeSharedForCausalLM",
    models="Granite with experts, one of them shared",
    gguf=None,
    note="GGUF files as those of Granite with experts",
)
