"""Writes a decoder's shape as keys of a GGUF file, with llama.cpp's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

import torch

from parlay.models.config import DecoderConfig, Json, RopeConfig, UnsupportedModel
from parlay.models.families.family import GgufForm
from parlay.models.families.granite import GRANITE_MOE, GRANITE_MOE_SHARED
from parlay.models.families.llama import LLAMA, MISTRAL, MIXTRAL
from parlay.models.families.olmo import OLMO2, OLMO3
from parlay.models.families.reading import yarn_attention_factor
from parlay.models.families.table import FAMILIES
from parlay.models.gguf.config import LONG_FACTORS, PATTERN, ROPE_FACTORS, SHORT_FACTORS, RopeFactors, decoder_config
from parlay.models.gguf.reader import Strings, TensorInfo, Value
from parlay.models.gguf.writing import KeyValue, packed_strings
from parlay.models.rope import cosines_and_sines, inverse_frequencies
from parlay.models.weights.formats import Format
from parlay.models.weights.shapes import some

_DIVIDED = ("llama3", "divided")
"""Kinds of rotary positions that files describe by the tensor `ROPE_FACTORS` instead of keys."""
_FRACTIONS = ("_scale", ".scale", "softcapping", "freq_base_swa")
"""Suffixes of keys with fractional values."""
_COMPARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("rms_norm_eps", "tie_embeddings", "embedding_scale", "logit_scale", "logit_cap", "per_layer_size"),
)
"""Fields of a decoder outside of its layers that must survive the file."""
_POSITIONS = 64
"""How many first positions are compared."""


_ALIKE = {
    MISTRAL.architecture: LLAMA.gguf,  # the same without windows
    MIXTRAL.architecture: LLAMA.gguf,
    OLMO2.architecture: OLMO3.gguf,
    GRANITE_MOE_SHARED.architecture: GRANITE_MOE.gguf,
}
"""Families whose files carry another family's name."""


def gguf_form(config: DecoderConfig) -> GgufForm:
    """The GGUF form of the decoder's family. Raises UnsupportedModel if its files can't describe this decoder."""
    family = FAMILIES.get(config.architecture)
    form = _ALIKE.get(config.architecture, family.gguf if family else None)
    if form is None:
        raise UnsupportedModel(f"{config.architecture}: Parlay writes no GGUF files of this family")
    if config.is_uneven:
        raise UnsupportedModel(f"{config.architecture}: no GGUF file is written of layers that differ")
    if config.rope.kind == "yarn" and config.rope.truncate != form.truncate:
        fields = str(config.rope.truncate).lower()
        raise UnsupportedModel(f"{config.architecture}: no key of GGUF says truncate={fields} of yarn positions")
    return form


def folder_keys(config: DecoderConfig, raw: Json, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, KeyValue]:
    """The keys for the model in a folder; ``tensors`` are the names and shapes of the file's tensors.

    ``raw`` is config.json with the family's own fields. Raises UnsupportedModel if a file with these keys would
    describe another model.
    """
    infos = {name: TensorInfo(name, Format.F32, shape, 0) for name, shape in tensors.items()}
    factors = {name: RopeFactors(name, tuple(numbers)) for name, numbers in rope_factors(config, raw).items()}
    used = factors.get(SHORT_FACTORS) or factors.get(ROPE_FACTORS) or RopeFactors()
    lost: list[str] = []
    for patterned in (False, True):  # most readers derive the pattern of windows from the architecture
        keys = shape_keys(config, raw, patterned=patterned)
        if not (lost := lost_facts(decoder_config(keys_as_read(keys), infos, used), config)):
            return keys
    raise UnsupportedModel(f"{config.architecture}: no keys of GGUF say {some(lost)} of this model's layers")


def keys_as_read(keys: Mapping[str, KeyValue]) -> dict[str, Value]:
    """The keys as `reader` would return them."""
    return {key: _as_read(value) for key, value in keys.items()}


def _as_read(value: KeyValue) -> Value:
    if isinstance(value, str | bool | int | float):
        return value
    texts = [item for item in value if isinstance(item, str)]
    return Strings(packed_strings(texts), len(texts)) if texts else tuple(value)  # type: ignore[return-value]


def lost_facts(found: DecoderConfig, wanted: DecoderConfig) -> list[str]:
    """Names of the fields in which two decoders differ."""
    ours, theirs = asdict(wanted), asdict(found)
    lost = [name for name in _COMPARED if not _near(ours[name], theirs[name])]
    for one, other in zip(wanted.forms, found.forms, strict=True):
        mine, its = asdict(one), asdict(other)
        lost += [name for name in mine if name != "rope" and not _near(mine[name], its[name])]
        size = wanted.heads_of(one).size
        turn, its_turn = (cosines_and_sines(form.rope, size, _POSITIONS) for form in (one, other))
        if turn.shape != its_turn.shape or not torch.allclose(turn, its_turn, rtol=1e-3, atol=1e-4):
            lost.append("positions")
    return list(dict.fromkeys(lost))


def _near(one: object, other: object) -> bool:
    """Whether two values are equal up to float32 rounding."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_near(one[key], other[key]) for key in one)
    return one == other


def shape_keys(config: DecoderConfig, raw: Json | None = None, *, patterned: bool = False) -> dict[str, KeyValue]:
    """The keys that describe the computation; the tensors of `rope_factors` belong to them.

    ``raw`` is config.json with the family's own fields; without it all layers must be Llama's, else UnsupportedModel is
    raised. With ``patterned`` a key lists the layers with windows.
    """
    form = gguf_form(config)
    name = form.name
    if raw is None and (form.names or config.rope.rotated or any(layer != config.llama for layer in config.forms)):
        raise UnsupportedModel(f"{config.architecture}: without a config.json only Llama's layers can be written")
    fields: dict[str, KeyValue] = {
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
        "rope.dimension_count": config.rope.rotated or config.head_dim,
        "vocab_size": config.vocab_size,
        **_rope_keys(config.rope),
        **_own_keys(form, raw or {}),
    }
    experts = next((layer.experts for layer in config.forms if layer.experts is not None), None)
    if experts is not None:
        fields |= {"expert_count": experts.count, "expert_used_count": experts.chosen}
    if patterned:
        fields[PATTERN] = [layer.window is not None for layer in config.forms]
    if config.canvas is not None:
        fields["attention.causal"] = False
    general: dict[str, KeyValue] = {"general.architecture": name, "general.type": "model"}
    keys = general | {f"{name}.{key}": value for key, value in fields.items()}
    if config.canvas is not None:
        keys["tokenizer.ggml.mask_token_id"] = config.canvas.mask_id
        keys["diffusion.shift_logits"] = config.canvas.shift
    return keys


def _own_keys(form: GgufForm, raw: Json) -> dict[str, KeyValue]:
    """The family's own keys that config.json has values for."""
    found = {key: raw.get(ours) for key, ours in form.keys.items()}
    return {
        key: float(value) if key.endswith(_FRACTIONS) else int(value)
        for key, value in found.items()
        if isinstance(value, int | float) and value
    }


def _rope_keys(rope: RopeConfig) -> dict[str, KeyValue]:
    if rope.kind == "divided" and rope.original_max_context:
        fields = {"rope.scaling.original_context_length": rope.original_max_context}
        return {**fields, "rope.scaling.attn_factor": float(rope.attention_factor)}
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


def rope_factors(config: DecoderConfig, raw: Json | None = None) -> dict[str, list[float]]:
    """Tensors of frequency divisors by name, for the kinds of positions that need them."""
    if config.rope.kind not in _DIVIDED:
        return {}
    fields = (raw or {}).get("rope_parameters") or (raw or {}).get("rope_scaling") or {}
    longer = fields.get("long_factor") if isinstance(fields, Mapping) else None
    if longer is not None:
        return {SHORT_FACTORS: list(config.rope.divisors), LONG_FACTORS: [float(number) for number in longer]}
    turned = config.rope.rotated or config.head_dim
    plain = inverse_frequencies(RopeConfig(theta=config.rope.theta), turned)
    return {ROPE_FACTORS: (plain / inverse_frequencies(config.rope, config.head_dim)[: turned // 2]).tolist()}
