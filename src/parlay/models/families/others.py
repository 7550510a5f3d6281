"""Families that differ little from Llama: ERNIE 4.5, Seed-OSS, EXAONE 4."""

from __future__ import annotations

from dataclasses import replace

from parlay.models.config import DecoderConfig, Json, LayerForm
from parlay.models.families.family import Family, GgufForm, all_but_every, windows_by_type, with_forms, with_layers


def _seed(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    form = replace(usual, out_bias=bool(raw.get("attention_out_bias", False)))
    return with_layers(config, form, [None] * config.num_layers)


def _exaone4(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """If some layers have a window, the others have no positions."""
    window, form = raw.get("sliding_window", 4096), replace(usual, pre_norms=False, post_norms=True)
    if window is None:
        return with_forms(config, [form] * config.num_layers)
    pattern = raw.get("sliding_window_pattern") or 4  # or a string such as LLLG
    slide = all_but_every(len(pattern) if isinstance(pattern, str) else int(pattern), config.num_layers)
    windows = windows_by_type(raw, config, window, slide)
    forms = [replace(form, window=size, rope=None if size is None else form.rope) for size in windows]
    return with_forms(config, forms)


ERNIE = Family(
    architecture="Ernie4_5ForCausalLM",
    models="ERNIE 4.5 0.3B",
    max_context=131_072,
    head_dim=128,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    interleaved=True,
    gguf=GgufForm("ernie4_5", interleaved=True),
)
SEED = Family(
    architecture="SeedOssForCausalLM",
    models="Seed-OSS",
    max_context=524_288,
    head_dim=128,
    attention_bias=True,
    complete=_seed,
    keys=("attention_out_bias",),
)
EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    models="EXAONE 4",
    max_context=2048,
    rms_norm_eps=1e-5,
    qk_norm=True,
    complete=_exaone4,
    keys=("sliding_window_pattern",),
    names={
        "post_attention_layernorm": "attention_out_layernorm",
        "post_feedforward_layernorm": "mlp_out_layernorm",
    },
)
