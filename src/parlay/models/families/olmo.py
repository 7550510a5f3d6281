"""OLMo 2 and 3: norms after attention and feed-forward instead of before, and query and key norms over all heads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from parlay.models.config import DecoderConfig, Json, LayerForm, RopeConfig
from parlay.models.families.family import Family, GgufForm, all_but_every, rope_by_type, windows_by_type, with_forms


def _form(usual: LayerForm) -> LayerForm:
    return replace(usual, pre_norms=False, post_norms=True, wide_qk_norm=True)


def _olmo2(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    return with_forms(config, [_form(usual)] * config.num_layers)


def _olmo3(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """Layers with a window use unscaled positions."""
    slide = all_but_every(4, config.num_layers)
    windows = windows_by_type(raw, config, raw.get("sliding_window", 4096), slide)
    full = _form(usual)
    local = replace(full, rope=RopeConfig(theta=float(raw.get("rope_local_base_freq") or config.rope.theta)))
    return with_forms(config, [full if window is None else replace(local, window=window) for window in windows])


def _of_files(raw: Json, config: DecoderConfig, tensors: Collection[str]) -> Json:
    """GGUF files of both are called olmo2; those without a window are OLMo 2's."""
    if not raw.get("sliding_window"):
        return {**raw, "sliding_window": None, "layer_types": ["full_attention"] * config.num_layers}
    return raw


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    max_context=2048,
    rms_norm_eps=1e-5,
    qk_norm=True,
    complete=_olmo2,
    names={
        "post_attention_layernorm": "attention_out_layernorm",
        "post_feedforward_layernorm": "mlp_out_layernorm",
    },
    note="its GGUF files are those of OLMo 3",
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    models="OLMo 3",
    note="",
    rope_theta=500_000.0,
    complete=_olmo3,
    normalize=rope_by_type,
    keys=("rope_local_base_freq",),
    gguf=GgufForm(
        "olmo2",
        keys={"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
        normalize=_of_files,
    ),
)
