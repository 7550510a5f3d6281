"""Llama, Mistral, whose layers may have a window, and Mixtral, with experts."""

from __future__ import annotations

from dataclasses import replace

from parlay.models.config import DecoderConfig, Experts, Json, LayerForm
from parlay.models.families.family import IMAGES, TEXT_PREFIXES, Family, GgufForm, with_layers


def _mistral(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    window = raw.get("sliding_window", 4096)  # transformers' default
    return with_layers(config, usual, [window] * config.num_layers)


def _mixtral(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    experts = Experts(
        count=int(raw.get("num_local_experts", 8)),
        chosen=int(raw.get("num_experts_per_tok", 2)),
        size=config.intermediate_size,
    )
    return with_layers(config, replace(usual, experts=experts), [raw.get("sliding_window")] * config.num_layers)


def _llama(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """GGUF files of Mixtral are called llama, too; a Llama's config.json has no experts."""
    if raw.get("num_local_experts"):
        return _mixtral(raw, config, usual)
    return with_layers(config, usual, [None] * config.num_layers)


LLAMA = Family(
    architecture="LlamaForCausalLM",
    models="Llama 2 and 3, SmolLM2, TinyLlama",
    max_context=2048,
    complete=_llama,
    gguf=GgufForm(
        "llama",
        interleaved=True,
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    ),
)
"""Mistral models of this form are called llama in GGUF files, too."""
MISTRAL = Family(
    architecture="MistralForCausalLM",
    models="Mistral, Mistral Nemo and Small",
    max_context=131_072,
    complete=_mistral,
    note="in GGUF files it is llama",
)
MISTRAL_IMAGES = replace(
    MISTRAL,
    architecture="Mistral3ForConditionalGeneration",
    models="Mistral Small 3.1 and 3.2",
    normalize=lambda raw: {"torch_dtype": raw.get("torch_dtype"), **raw.get("text_config", {})},
    prefixes=TEXT_PREFIXES,
    left_out=IMAGES,
    note="text only; in GGUF files it is llama",
)
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    models="Mixtral",
    max_context=131_072,
    rope_theta=1_000_000.0,
    rms_norm_eps=1e-5,
    complete=_mixtral,
    keys=("num_local_experts", "num_experts_per_tok"),
    prefixes={"block_sparse_moe.": "mlp."},
    names={".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."},
    note="in GGUF files it is llama",
)
