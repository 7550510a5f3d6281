"""GLM-4: the first half of each head is rotated, in neighbouring pairs; newer models norm the outputs of attention and
feed-forward, too.

GLM-4.5 rotates the two halves of that half, and chooses experts by sigmoids.
"""

from __future__ import annotations

from dataclasses import replace

from parlay.models.config import DecoderConfig, Experts, Json, LayerForm
from parlay.models.families.family import Family, GgufForm, with_forms, with_layers

GROUPED = (
    *("moe_intermediate_size", "num_experts_per_tok", "n_shared_experts", "n_routed_experts", "routed_scaling_factor"),
    *("n_group", "topk_group", "first_k_dense_replace", "norm_topk_prob", "use_qk_norm"),
)
"""Keys of config.json for experts chosen by sigmoids in groups."""


def _glm(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """Biases for query, key and value projections, but not for the output projection."""
    return with_layers(config, replace(usual, out_bias=False), [None] * config.num_layers)


def _glm4(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    return _glm(raw, config, replace(usual, post_norms=True))


def grouped_experts(raw: Json, usual: LayerForm, layers: int, count: str, *, normalized: bool) -> list[LayerForm]:
    """Forms of layers with experts chosen by sigmoids, from DeepSeek-V3's keys; the first layers are dense.

    ``count`` is the key with the number of experts.
    """
    size = int(raw["moe_intermediate_size"])
    experts = Experts(
        count=int(raw[count]),
        chosen=int(raw["num_experts_per_tok"]),
        size=size,
        normalized=bool(raw.get("norm_topk_prob", normalized)),
        shared=size * int(raw.get("n_shared_experts", raw.get("num_shared_experts", 1)) or 0),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        sigmoid=True,
        groups=int(raw.get("n_group") or 1),
        top_groups=int(raw.get("topk_group") or 1),
    )
    dense = int(raw.get("first_k_dense_replace", 1))
    return [usual if layer < dense else replace(usual, experts=experts) for layer in range(layers)]


def _glm4_moe(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    usual = replace(usual, out_bias=False, qk_norm=bool(raw.get("use_qk_norm", False)))
    return with_forms(config, grouped_experts(raw, usual, config.num_layers, "n_routed_experts", normalized=True))


GLM = Family(
    architecture="GlmForCausalLM",
    models="GLM-4 9B Chat",
    max_context=131_072,
    head_dim=128,
    attention_bias=True,
    rms_norm_eps=1.5625e-07,
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
GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, 4.6 and Air",
    max_context=131_072,
    rms_norm_eps=1e-5,
    rotated=0.5,
    complete=_glm4_moe,
    keys=(*GROUPED, "num_nextn_predict_layers"),
    left_out=("model.layers.{layers}.",),
    names={"mlp.shared_experts.": "mlp.shared_expert."},
    note="without its layer for multi-token prediction (MTP)",
)
