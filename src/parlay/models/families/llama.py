"""Llama, whose layers are the plain ones, and Mistral, all of whose layers may have a sliding window."""

from __future__ import annotations

from parlay.models.config import DecoderConfig, Json, LayerForm
from parlay.models.families.family import Family, GgufForm, with_layers


def _mistral(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    window = raw.get("sliding_window", 4096)  # what transformers assumes where it isn't said
    return with_layers(config, usual, [window] * config.num_layers)


LLAMA = Family(architecture="LlamaForCausalLM", max_context=2048, gguf=GgufForm("llama", interleaved=True))
"""In GGUF files Mistral's models of this form call themselves llama, too."""
MISTRAL = Family(architecture="MistralForCausalLM", max_context=131_072, complete=_mistral)
