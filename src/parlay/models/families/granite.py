"""Granite 3: Llama's layers with multipliers of embeddings, scores, residuals and logits; some with experts.

Some Granite 4 models have Mamba layers; the others run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from parlay.models.config import DecoderConfig, Experts, Json, LayerForm, UnsupportedModel
from parlay.models.families.family import REPLAYED, Family, GgufForm, with_layers

if TYPE_CHECKING:
    from torch import Tensor

    from parlay.models.weights.shapes import Weight

SOME_MAMBA = f"some of its layers are recurrent (Mamba): {REPLAYED}"
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


def _granite4(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """Raises UnsupportedModel if some layers are recurrent. The shared feed-forward may be the only one."""
    kinds = raw.get("layer_types") or ["linear_attention"]
    if not {"attention", "full_attention"}.issuperset(kinds):
        raise UnsupportedModel(f"{config.architecture}: {SOME_MAMBA}")
    form = usual if raw.get("position_embedding_type") == "rope" else replace(usual, rope=None)
    if raw.get("num_local_experts", 8):
        return _with_experts(raw, config, form)
    return _granite(raw, replace(config, intermediate_size=int(raw.get("shared_intermediate_size", 1024))), form)


def _alone(tensors: Mapping[str, Tensor]) -> Mapping[str, Weight]:
    """Without experts the shared feed-forward becomes the layer's feed-forward."""
    if any(".block_sparse_moe." in name for name in tensors):
        return tensors
    inner, outer = ("shared_mlp.input_linear", "mlp.gate_up_proj"), ("shared_mlp.output_linear", "mlp.down_proj")
    return {name.replace(*inner).replace(*outer): tensor for name, tensor in tensors.items()}


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
    note="its GGUF files are those of Granite with experts",
)
GRANITE4 = replace(
    GRANITE_MOE_SHARED,
    architecture="GraniteMoeHybridForCausalLM",
    models="Granite 4",
    complete=_granite4,
    keys=(
        *GRANITE_MOE.keys,
        "position_embedding_type",
        *(f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size")),
        *("mamba_conv_bias", "mamba_proj_bias"),
    ),
    regroup=_alone,
    note="without Mamba; in GGUF files it is granite; models with Mamba run through transformers",
)
