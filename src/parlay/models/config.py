"""What a checkpoint's config.json says, read strictly into one frozen record that the native decoder is built from.

Four architectures share one shape (pre-norm RMS, rotary positions, grouped-query attention, gated SiLU feed-forward):
Llama, Mistral, Qwen2, Qwen3. Anything the native decoder can't reproduce exactly is refused by name, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from parlay.types import ParlayError

RopeKind = Literal["default", "linear", "llama3", "yarn", "divided"]


class UnsupportedModel(ParlayError):
    """The model can't be run this way; the message names the architecture and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: base wavelength ``theta`` and how its frequencies are stretched.

    linear: all divided by ``factor``. llama3: by wavelength, between ``low_freq_factor`` and ``high_freq_factor``.
    yarn (Peng et al. 2023): a ramp between ``beta_fast`` and ``beta_slow`` rotations, cosines and sines times
    ``attention_factor``, ramp ends rounded outwards if ``truncate``. divided: each pair's by its own of ``divisors``.
    Numbers of other kinds keep their defaults.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """How a draft head of one layer or more differs from a decoder; its rows read features in place of embeddings.

    Its logits are over ``draft_vocab_size`` tokens. ``beside``: the first layer's attention reads the embedding beside
    the features, each normed by itself (EAGLE-3). ``bare``: the first layer's attention and the LM head read hidden
    states that no norm has changed (EAGLE-1). ``normed``: features are normed before the layer, so its attention reads
    them as they are. The last tap is what leaves the last layer, before a norm.
    """

    draft_vocab_size: int
    beside: bool = False
    bare: bool = False
    normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder of the Llama lineage. Sizes count elements; ``max_context`` counts tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """What the checkpoint says its weights are stored in."""
    head: HeadForm | None = None
    """None for all models that are not draft heads."""

    @property
    def output_size(self) -> int:
        """Logits of a row."""
        return self.head.draft_vocab_size if self.head else self.vocab_size


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture implies without a field in config.json."""

    max_context: int
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: Literal["never", "always", "switched"] = "never"
    """Whether ``sliding_window`` counts: not at all, always, or from layer ``max_window_layers`` on if switched on."""


_FAMILIES = {
    "LlamaForCausalLM": _Family(max_context=2048),
    "MistralForCausalLM": _Family(max_context=131_072, window="always"),
    "Qwen2ForCausalLM": _Family(max_context=32_768, qkv_bias=True, window="switched"),
    "Qwen3ForCausalLM": _Family(max_context=32_768, qk_norm=True, head_dim=128, window="switched"),
}

Json = Mapping[str, Any]

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
    """As `read_config`, of ``raw``, which stands somewhere in that folder's config.json."""
    _check_counts(directory, raw)
    family = _FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(f"{architecture}: the native decoder runs {', '.join(_FAMILIES)}")
    try:
        config = _decoder(raw, architecture, family, _eos_ids(directory, raw))
    except KeyError as missing:
        raise UnsupportedModel(f"{architecture}: config.json has no {missing.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ParlayError(f"{directory}: config.json is no description of a {architecture}: {error}") from None
    _check_sizes(directory, config)
    _check_rope(directory, config.rope)
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


def _wrong(directory: Path, name: str, value: object, expected: str) -> ParlayError:
    return ParlayError(f"{directory}: config.json says {name} {value!s:.40}: expected {expected}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ParlayError with one line when there is none."""
    if path.exists() and not path.is_file():
        raise ParlayError(f"can't read {path}: it is no file")  # a pipe would be waited for
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParlayError(f"no {path.name} in {path.parent}: is this a model's folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ParlayError(f"can't read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ParlayError(f"{path} holds no JSON object")
    return content


def architecture_of(raw: Json) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else raw.get("model_type")
    return str(name or "unknown architecture")


def _decoder(raw: Json, architecture: str, family: _Family, eos_ids: tuple[int, ...]) -> DecoderConfig:
    max_context = int(raw.get("max_position_embeddings") or family.max_context)
    _refuse_unknown(raw, architecture, family, max_context)
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    return DecoderConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or family.head_dim or hidden // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_context=max_context,
        rope=_rope(raw, architecture, max_context),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        eos_ids=eos_ids,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _refuse_unknown(raw: Json, architecture: str, family: _Family, max_context: int) -> None:
    """Raises UnsupportedModel for the first option that the native decoder does not compute."""
    window = _window(raw, family)
    activation = raw.get("hidden_act", "silu")
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    reasons = {
        "quantized weights (quantization_config)": raw.get("quantization_config") is not None,
        f"sliding window of {window} tokens": window is not None and window < max_context,
        f"activation {activation!r}": activation not in ("silu", "swish"),
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        f"{heads} heads over {kv_heads} key-value heads": bool(kv_heads) and heads % kv_heads != 0,
    }
    for reason, present in reasons.items():
        if present:
            raise UnsupportedModel(f"{architecture}: {reason} is not supported by the native decoder")


def _window(raw: Json, family: _Family) -> int | None:
    """Width of the sliding window of some layer, or None when every layer sees the whole text."""
    window: int | None = raw.get("sliding_window", 4096)  # what transformers assumes where it isn't said
    if family.window == "always":
        return window
    if family.window == "never" or not raw.get("use_sliding_window", False):
        return None
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        return window if "sliding_attention" in layer_types else None
    return window if raw.get("max_window_layers", 28) < raw["num_hidden_layers"] else None


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
