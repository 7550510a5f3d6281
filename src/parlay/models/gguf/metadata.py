"""The keys of a GGUF file for a decoder that has none yet: its shape, in the words of llama.cpp."""

from __future__ import annotations

from parlay.models.config import DecoderConfig, RopeConfig, UnsupportedModel
from parlay.models.families.family import GgufForm
from parlay.models.families.llama import LLAMA, MISTRAL
from parlay.models.families.reading import yarn_attention_factor
from parlay.models.families.table import FAMILIES
from parlay.models.gguf.config import ROPE_FACTORS
from parlay.models.gguf.writing import KeyValue
from parlay.models.rope import inverse_frequencies

_DIVIDED = ("llama3", "divided")
"""Kinds of positions that files describe by a tensor, `ROPE_FACTORS`, in place of keys."""


def gguf_form(config: DecoderConfig) -> GgufForm:
    """How GGUF files have the decoder's family. Raises UnsupportedModel where they can't have this decoder."""
    family = FAMILIES.get(config.architecture)
    form = family.gguf if family else None
    if config.architecture == MISTRAL.architecture:
        form = LLAMA.gguf  # without windows the two are one
    if form is None:
        raise UnsupportedModel(f"{config.architecture}: Parlay writes no GGUF files of this family")
    if form.names or config.rope.rotated or any(layer != config.llama for layer in config.forms):
        raise UnsupportedModel(
            f"{config.architecture}: Parlay writes no GGUF files of models with other layers than Llama's"
        )
    if config.rope.kind == "yarn" and not config.rope.truncate:
        raise UnsupportedModel(f"{config.architecture}: no key of GGUF says truncate=false of yarn positions")
    return form


def shape_keys(config: DecoderConfig) -> dict[str, KeyValue]:
    """The keys that say what the decoder computes; tensors of `rope_factors` go with them."""
    name = gguf_form(config).name
    said: dict[str, KeyValue] = {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope.theta),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        **_rope_keys(config.rope),
    }
    if config.canvas is not None:
        said["attention.causal"] = False
    general: dict[str, KeyValue] = {"general.architecture": name, "general.type": "model"}
    keys = general | {f"{name}.{key}": value for key, value in said.items()}
    if config.canvas is not None:
        keys["tokenizer.ggml.mask_token_id"] = config.canvas.mask_id
        keys["diffusion.shift_logits"] = config.canvas.shift
    return keys


def _rope_keys(rope: RopeConfig) -> dict[str, KeyValue]:
    if rope.kind not in ("linear", "yarn"):
        return {}
    keys: dict[str, KeyValue] = {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "yarn":
        keys |= {
            "rope.scaling.original_context_length": rope.original_max_context,
            "rope.scaling.attn_factor": rope.attention_factor / yarn_attention_factor(rope.factor),
            "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
            "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
        }
    return keys


def rope_factors(config: DecoderConfig) -> tuple[str, list[float]] | None:
    """The name and the numbers of the tensor that divides frequencies, where positions are of such a kind."""
    if config.rope.kind not in _DIVIDED:
        return None
    plain = inverse_frequencies(RopeConfig(theta=config.rope.theta), config.head_dim)
    return ROPE_FACTORS, (plain / inverse_frequencies(config.rope, config.head_dim)).tolist()
