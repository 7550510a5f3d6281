"""Qwen2, with biases of queries, keys and values, and Qwen3, with norms of queries and keys."""

from __future__ import annotations

from parlay.models.config import DecoderConfig, Json, LayerForm
from parlay.models.families.family import Family, GgufForm, windows_by_type, with_layers


def _qwen(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """Layers from ``max_window_layers`` on may have a sliding window, where it is switched on."""
    if not raw.get("use_sliding_window", False):
        return with_layers(config, usual, [None] * config.num_layers)
    slide = [layer >= raw.get("max_window_layers", 28) for layer in range(config.num_layers)]
    return with_layers(config, usual, windows_by_type(raw, config, raw.get("sliding_window", 4096), slide))


QWEN2 = Family(
    architecture="Qwen2ForCausalLM", max_context=32_768, qkv_bias=True, complete=_qwen, gguf=GgufForm("qwen2")
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    max_context=32_768,
    head_dim=128,
    qk_norm=True,
    complete=_qwen,
    gguf=GgufForm("qwen3"),
)
