"""SmolLM3: Llama's layers, every fourth of which has no positions."""

from __future__ import annotations

from dataclasses import replace

from parlay.models.config import DecoderConfig, Json, LayerForm
from parlay.models.families.family import Family, GgufForm, all_but_every, windows_by_type, with_forms


def _smollm3(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    turning = raw.get("no_rope_layers")  # 1: the layer has rotary positions
    if turning is None:
        turning = all_but_every(int(raw.get("no_rope_layer_interval", 4)), config.num_layers)
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    windows = windows_by_type(raw, config, window, [not turns for turns in turning])
    forms = [
        replace(usual, window=size, rope=usual.rope if turns else None)
        for size, turns in zip(windows, turning, strict=True)
    ]
    return with_forms(config, forms)


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3",
    max_context=32_768,
    rope_theta=2_000_000.0,
    tie_embeddings=True,
    complete=_smollm3,
    keys=("no_rope_layers", "no_rope_layer_interval"),
    gguf=GgufForm("smollm3", interleaved=True),
)
