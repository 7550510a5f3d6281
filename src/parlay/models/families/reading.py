"""Reads a checkpoint's config.json strictly: what the native decoder does not compute is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from parlay.models.config import Activation, DecoderConfig, Json, RopeConfig, UnsupportedModel, read_json
from parlay.models.families.diffusion import REFUSED, with_set_block
from parlay.models.families.family import Family
from parlay.models.families.table import FAMILIES
from parlay.types import ParlayError

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_MOST_LAYERS = 10_000
_MOST: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": _MOST_LAYERS,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_context": 1 << 31,
}
"""Of the fields of `DecoderConfig` that count something: several times as much as any model has. More is a mistake, or
meant to take this machine's time and memory."""


def read_config(directory: Path) -> DecoderConfig:
    """The decoder that ``directory/config.json`` describes.

    Raises UnsupportedModel, naming architecture and reason, for what the native decoder can't run, and ParlayError
    for a folder without a config.json that makes sense.
    """
    raw = read_json(directory / "config.json")
    return config_of(directory, raw, architecture_of(raw))


def config_of(directory: Path, raw: Json, architecture: str) -> DecoderConfig:
    """Read the decoder that ``raw`` describes, a part of that folder's config.json; see `read_config`."""
    _check_counts(directory, raw)
    family = FAMILIES.get(architecture)
    refused = REFUSED.get(architecture) or REFUSED.get(str(raw.get("model_type")))
    if refused is not None:
        raise ParlayError(f"{architecture}: {refused}")
    if family is None:
        raise UnsupportedModel(f"{architecture}: the native decoder runs {', '.join(FAMILIES)}")
    try:
        config = _decoder(family.said(raw), family, _eos_ids(directory, raw))
    except KeyError as missing:
        raise UnsupportedModel(f"{architecture}: config.json has no {missing.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ParlayError(f"{directory}: config.json is no description of a {architecture}: {error}") from None
    _check_sizes(directory, config)
    _check_rope(directory, config.rope)
    _check_layers(directory, config)
    return config


def _check_counts(directory: Path, raw: Json) -> None:
    """Raises ParlayError for more layers or experts than anyone has: whoever builds the model would never end."""
    for part in (raw, *(part for part in raw.values() if isinstance(part, Mapping))):
        for name, value in part.items():
            counts = isinstance(value, int | float) and ("layer" in name or "expert" in name)
            if counts and not value <= _MOST_LAYERS:
                raise _wrong(directory, name, value, f"at most {_MOST_LAYERS}")


def _check_sizes(directory: Path, config: DecoderConfig) -> None:
    said = asdict(config)
    for name, most in _MOST.items():
        if not 1 <= said[name] <= most:
            raise _wrong(directory, name, said[name], f"at least 1 and at most {most}")
    if config.head_dim % 2:
        raise _wrong(directory, "head_dim", config.head_dim, "an even number")
    if not 0 <= config.rms_norm_eps < math.inf:
        raise _wrong(directory, "rms_norm_eps", config.rms_norm_eps, "a number of at least 0")


def _check_rope(directory: Path, rope: RopeConfig) -> None:
    numbers = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    said = asdict(rope)
    for name in numbers:
        if not 0 < said[name] < math.inf:
            raise _wrong(directory, f"rope {name}", said[name], "a number above 0")
    if not 1 < rope.theta < math.inf:
        raise _wrong(directory, "rope_theta", rope.theta, "a number above 1")
    if not 0 <= rope.original_max_context <= _MOST["max_context"]:
        raise _wrong(directory, "original_max_position_embeddings", rope.original_max_context, "a number of tokens")
    if not rope.low_freq_factor < rope.high_freq_factor:
        raise _wrong(directory, "rope low_freq_factor", rope.low_freq_factor, "less than high_freq_factor")


def _check_layers(directory: Path, config: DecoderConfig) -> None:
    for form in set(config.layers):
        if form.scale is not None and not 0 < form.scale < math.inf:
            raise _wrong(directory, "a scale of scores", form.scale, "a number above 0")
        for name, cap in (("a cap of scores", form.score_cap), ("a cap of logits", config.logit_cap)):
            if not 0 <= cap < math.inf:
                raise _wrong(directory, name, cap, "a number of at least 0")


def _wrong(directory: Path, name: str, value: object, expected: str) -> ParlayError:
    return ParlayError(f"{directory}: config.json says {name} {value!s:.40}: expected {expected}")


def architecture_of(raw: Json) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else raw.get("model_type")
    return str(name or "unknown architecture")


def _decoder(raw: Json, family: Family, eos_ids: tuple[int, ...]) -> DecoderConfig:
    max_context = int(raw.get("max_position_embeddings") or family.max_context)
    activation = raw.get("hidden_activation") or raw.get("hidden_act", family.activation)
    _refuse_unknown(raw, family.architecture, activation)
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    config = DecoderConfig(
        architecture=family.architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or family.head_dim or hidden // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_context=max_context,
        rope=_rope(raw, family.architecture, max_context),
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.tie_embeddings)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        eos_ids=eos_ids,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )
    complete = family.complete(raw, config, replace(config.llama, activation=_ACTIVATIONS[activation]))
    return with_set_block(raw, complete)


def _refuse_unknown(raw: Json, architecture: str, activation: object) -> None:
    """Raises UnsupportedModel for the first option that the native decoder does not compute."""
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    reasons = {
        "quantized weights (quantization_config)": raw.get("quantization_config") is not None,
        f"activation {activation!r}": activation not in _ACTIVATIONS,
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "bidirectional attention (use_bidirectional_attention)": bool(raw.get("use_bidirectional_attention")),
        f"{heads} heads over {kv_heads} key-value heads": bool(kv_heads) and heads % kv_heads != 0,
    }
    for reason, present in reasons.items():
        if present:
            raise UnsupportedModel(f"{architecture}: {reason} is not supported by the native decoder")


def _rope(raw: Json, architecture: str, max_context: int) -> RopeConfig:
    """Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before)."""
    said: Json = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = float(said.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if said.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) not in (1.0, None):
        raise UnsupportedModel(f"{architecture}: partial rotary positions are not supported by the native decoder")
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=float(said["factor"]))
    original = raw.get("original_max_position_embeddings") or said.get("original_max_position_embeddings")
    original_context = int(original or max_context)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=float(said["factor"]),
            original_max_context=original_context,
            low_freq_factor=float(said["low_freq_factor"]),
            high_freq_factor=float(said["high_freq_factor"]),
        )
    if kind == "yarn":
        return _yarn(said, theta, original_context, max_context)
    raise UnsupportedModel(f"{architecture}: rope type {kind!r} is not supported by the native decoder")


def _yarn(said: Json, theta: float, original_context: int, max_context: int) -> RopeConfig:
    factor = float(said.get("factor") or max_context / original_context)
    attention_factor = said.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, said.get("mscale"), said.get("mscale_all_dim"))
    truncate = said.get("truncate")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_context=original_context,
        beta_fast=float(said.get("beta_fast") or 32),
        beta_slow=float(said.get("beta_slow") or 1),
        attention_factor=float(attention_factor),
        truncate=True if truncate is None else bool(truncate),
    )


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The paper's 0.1 ln(s) + 1, or the ratio of two such terms where the checkpoint weights them."""

    def term(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)


def _eos_ids(directory: Path, raw: Json) -> tuple[int, ...]:
    """End-of-text ids of generation_config.json, else of config.json; empty when neither names one."""
    path = directory / "generation_config.json"
    said = read_json(path).get("eos_token_id") if path.exists() else None
    if said is None:
        said = raw.get("eos_token_id")
    if said is None:
        return ()
    return tuple(map(int, said)) if isinstance(said, list) else (int(said),)
