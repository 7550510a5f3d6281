"""Reads a checkpoint's config.json strictly: what the native decoder does not compute is refused, with its name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from parlay.models.config import Activation, DecoderConfig, Json, RopeConfig, UnsupportedModel, read_json
from parlay.models.families.checking import MOST_LAYERS, check_forms, wrong
from parlay.models.families.diffusion import REFUSED, with_set_block
from parlay.models.families.family import Family
from parlay.models.families.table import ELSEWHERE, FAMILIES
from parlay.models.quantized.reading import scheme_of
from parlay.types import ParlayError

ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ARITHMETIC = re.compile(
    r"scal|multiplier|soft_?cap|_cap$|clip|norm|rope|rotary|window|expert|moe_|router|residual|attention|attn|bias|alibi|"
    r"parallel|gate|swiglu|spars|altup|laurel|mup_|temperature|alpha|lora|latent|conv_|mamba|ssm_|chunk|linear_|"
    r"kv_shared|per_layer|double_wide|global_|dense_replace|position_embedding_type"
)
_HARMLESS = re.compile(r"dropout|pdrop|initializer|aux_loss|output_|^_|implementation|jitter|flash|_token|_bos|_eos")
"""Parts of keys that may change what a model computes, and parts of keys that never matter for decoding."""
_FACTOR = re.compile(r"multiplier|scal(e|ing)|factor")
_COUNT = re.compile(r"expert|step|freq|interval|group|layers|_mod$")
"""Parts of keys whose value 1 changes nothing: multipliers, and counts of what is there anyway."""
_USUAL_FORMS = ("default", "absolute", "rmsnorm")
"""Values of keys that name what is computed anyway."""
_READ = (
    *("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "attention_bias", "mlp_bias", "layer_types"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "use_bidirectional_attention"),
)
"""Keys that are read here for every family, or that mean nothing without windows."""
_LISTS = ("layer_types", "long_factor", "short_factor", "mlp_only_layers")
_WHOLE = re.compile(
    r"^num_|_size$|_dim$|^n_|_experts$|_layers$|_position_embeddings$|^sliding_window$|_interval$|_freq$"
)
_NUMBER = re.compile(r"_eps$|theta$|factor$|scal(e|ing)$|multiplier$|cap(ping)?$|^beta_|^mscale")
"""Names of keys of config.json whose values are lists, integers and numbers."""
_SWITCH = re.compile(r"^(use|is|has|no|enable|apply|add|do|with|norm|output|return)_")
_NEEDED = ("num_attention_heads", "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers")
_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_context": "max_position_embeddings",
}
"""Names in config.json of fields of `DecoderConfig`."""
_OF_ROPE = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    *("truncate", "short_factor", "long_factor", "finetuned"),
)
"""Keys of rotary parameters that are read or change nothing."""


def read_config(directory: Path, longest: int = 0) -> DecoderConfig:
    """Read ``directory/config.json`` as a decoder for texts of up to ``longest`` tokens; 0: the usual length.

    With longrope, long texts have other position factors; if ``longest`` allows long texts, these factors apply from
    the first token on. Raises UnsupportedModel, naming architecture and reason, for a model that the native decoder
    can't run, and ParlayError for a folder without a sound config.json.
    """
    raw = read_json(directory / "config.json")
    return config_of(directory, raw, architecture_of(raw), longest)


def config_of(directory: Path, raw: Json, architecture: str, longest: int = 0) -> DecoderConfig:
    """Read ``raw``, which is that folder's config.json or a part of it, as a decoder; see `read_config`."""
    _check_counts(directory, raw)
    family = FAMILIES.get(architecture)
    refused = REFUSED.get(architecture) or REFUSED.get(str(raw.get("model_type")))
    if refused is not None:
        raise ParlayError(f"{architecture}: {refused}")
    if family is None:
        why = ELSEWHERE.get(architecture, "no family of Parlay's decoder; parlay models --families lists them")
        raise UnsupportedModel(f"{architecture}: {why}")
    try:
        config = _decoder(family.normalize(raw), family, _eos_ids(directory, raw), longest)
    except KeyError as missing:
        raise UnsupportedModel(f"{architecture}: config.json has no {missing.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        if (odd := _odd(raw)) is not None:
            raise wrong(f"{directory}/config.json", *odd) from None
        raise ParlayError(
            f"{directory}/config.json can't be read as that of a {architecture}{_plainly(error)}"
        ) from None
    try:
        scheme_of(directory, raw, family.quantized)
    except UnsupportedModel as reason:
        raise UnsupportedModel(f"{architecture}: {reason}") from None
    check_forms(f"{directory}/config.json", config, _NAMES)
    return config


def _check_counts(directory: Path, raw: Json) -> None:
    """Raises ParlayError for more layers or experts than any model has, as building it would never end, and for true in
    place of a number, which Python takes for 1."""
    for part in (raw, *(part for part in raw.values() if isinstance(part, Mapping))):
        for name, value in part.items():
            counts = isinstance(value, int | float) and ("layer" in name or "expert" in name)
            if counts and not value <= MOST_LAYERS:
                raise wrong(f"{directory}/config.json", name, value, f"at most {MOST_LAYERS}")
            named = (_WHOLE.search(name) or _NUMBER.search(name)) and not _SWITCH.search(name)
            if isinstance(value, bool) and named and (value or name != "sliding_window"):
                raise wrong(f"{directory}/config.json", name, str(value).lower(), "a number")


def _odd(raw: Json) -> tuple[str, object, str] | None:
    """The first value of a wrong type, as name, value and what was expected."""
    for name, value in raw.items():
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, Mapping):
            if (odd := _odd(value)) is not None:
                return f"{name}.{odd[0]}", *odd[1:]
        elif (expected := _expected(name, value)) is not None:
            return name, "null" if value is None else value, expected
    return None


def _expected(name: str, value: object) -> str | None:
    """Return what this key's value should be; None if the value may be right."""
    if value is None:
        return "a whole number" if name in _NEEDED else None
    rules = {
        "an object": name in ("rope_scaling", "rope_parameters"),
        "a name": name in ("hidden_act", "hidden_activation") and not isinstance(value, str),
        "a list": name in _LISTS and not isinstance(value, list),
        "a whole number": bool(_WHOLE.search(name)) and not _is_number(value, whole=True),
        "a number": bool(_NUMBER.search(name)) and not (_is_number(value) or isinstance(value, list)),
    }
    return next((expected for expected, wanted in rules.items() if wanted), None)


def _plainly(error: Exception) -> str:
    """An error's message without Python's own wording, to be appended to another; empty if nothing is left."""
    if type(error) is not ValueError:
        return ""
    text = re.search(r"(?:invalid literal for int\(\).*?|could not convert string to float): (.*)", str(error))
    return f": {text[1]} is not a number" if text is not None else f": {error}"


def _whole(value: str | float) -> int:
    """Raises ValueError for a fraction."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{value} is not a whole number")
    return int(value)


def _is_number(value: object, *, whole: bool = False) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return not whole or value == int(value)


def architecture_of(raw: Json) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else raw.get("model_type")
    return str(name or "unknown architecture")


def _decoder(raw: Json, family: Family, eos_ids: tuple[int, ...], longest: int) -> DecoderConfig:
    max_context = _whole(raw.get("max_position_embeddings") or family.max_context)
    activation = raw.get("hidden_activation") or raw.get("hidden_act", family.activation)
    _refuse_unknown(raw, family, activation)
    heads, hidden = _whole(raw["num_attention_heads"]), _whole(raw["hidden_size"])
    head_dim = _whole(raw.get("head_dim") or family.head_dim or hidden // heads)
    biased = bool(raw.get("attention_bias", family.attention_bias))
    rope = _rope(raw, family, max_context, head_dim, longest)
    if rope.kind == "yarn":  # config.json mostly has the context from before positions were scaled
        max_context = max(max_context, int(rope.original_max_context * rope.factor))
    config = DecoderConfig(
        architecture=family.architecture,
        vocab_size=_whole(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=_whole(raw["intermediate_size"]),
        num_layers=_whole(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=_whole(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", family.rms_norm_eps)),
        max_context=max_context,
        rope=rope,
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.tie_embeddings)),
        qkv_bias=family.qkv_bias or biased,
        qk_norm=family.qk_norm,
        eos_ids=eos_ids,
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )
    original = config.rope.original_max_context
    if config.rope.kind == "divided" and longest <= original:  # these factors are only for short texts
        config = replace(config, max_context=min(max_context, original))
    usual = replace(config.llama, activation=ACTIVATIONS[activation], out_bias=biased)
    complete = family.complete(raw, config, usual)
    return with_set_block(raw, complete)


def _refuse_unknown(raw: Json, family: Family, activation: object) -> None:
    """Raises UnsupportedModel for the first option that changes the arithmetic and is not computed here."""
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    unknown = next(_unknown_keys(raw, family), None)
    reasons = {
        f"activation {activation!r}": activation not in ACTIVATIONS,
        "mlp_bias": bool(raw.get("mlp_bias")),
        "bidirectional attention (use_bidirectional_attention)": bool(raw.get("use_bidirectional_attention")),
        "bidirectional attention (is_causal false)": family.canvas is None and raw.get("is_causal") is False,
        f"{heads} heads over {kv_heads} key-value heads": bool(kv_heads) and heads % kv_heads != 0,
        f"{unknown}": unknown is not None,
    }
    for reason, present in reasons.items():
        if present:
            raise UnsupportedModel(f"{family.architecture}: {reason} is not supported by the native decoder")


def _unknown_keys(raw: Json, family: Family) -> Iterator[str]:
    """Keys whose names suggest that they change the arithmetic, which are switched on and not read for this family."""
    if family.canvas is not None:  # diffusion configs have many keys of training, and their own reader refuses by name
        return
    known = {*_READ, *family.keys}
    for name in ("rope_scaling", "rope_parameters"):
        for key, value in (raw.get(name) or {}).items():
            if key not in _OF_ROPE and _is_on(key, value):
                yield f"{name}.{key} {value!r:.40}"
    for key, value in raw.items():
        if key not in known and _ARITHMETIC.search(key) and not _HARMLESS.search(key) and _is_on(key, value):
            yield f"{key} {value!r:.40}"


def _is_on(key: str, value: object) -> bool:
    """Whether a key with this value changes what a model computes."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value not in (None, False, "", [], {}) and value not in _USUAL_FORMS
    neutral = (1,) if _FACTOR.search(key) else (0, 1) if _COUNT.search(key) else (0,)
    return value not in neutral


def _rope(raw: Json, family: Family, max_context: int, head_dim: int, longest: int) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` with ``rope_scaling`` (earlier versions)."""
    declared: Json = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    share = declared.get("partial_rotary_factor", raw.get("partial_rotary_factor", family.rotated))
    rotated = int(head_dim * float(1.0 if share is None else share))
    scaled = _scaled(raw, declared, family, max_context, longest)
    return replace(scaled, rotated=0 if rotated == head_dim else rotated)


def _scaled(raw: Json, declared: Json, family: Family, max_context: int, longest: int) -> RopeConfig:
    theta = float(declared.get("rope_theta") or raw.get("rope_theta") or family.rope_theta)
    kind = declared.get("rope_type") or declared.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=float(declared["factor"]))
    original = raw.get("original_max_position_embeddings") or declared.get("original_max_position_embeddings")
    original_context = int(original or max_context)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=float(declared["factor"]),
            original_max_context=original_context,
            low_freq_factor=float(declared["low_freq_factor"]),
            high_freq_factor=float(declared["high_freq_factor"]),
        )
    if kind == "yarn":
        return _yarn(declared, theta, original_context, max_context)
    if kind in ("longrope", "su"):
        return _longrope(declared, theta, original_context, max_context, longest > original_context)
    raise UnsupportedModel(f"{family.architecture}: rope type {kind!r} is not supported by the native decoder")


def _longrope(declared: Json, theta: float, original_context: int, max_context: int, long: bool) -> RopeConfig:
    """longrope's factors: those for texts that fit the original context, or, if ``long``, those for long texts."""
    factor = float(declared.get("factor") or max_context / original_context)
    attention_factor = declared.get("attention_factor")
    if attention_factor is None:
        attention_factor = longrope_attention_factor(factor, original_context)
    return RopeConfig(
        theta=theta,
        kind="divided",
        original_max_context=original_context,
        attention_factor=float(attention_factor),
        divisors=tuple(map(float, declared["long_factor" if long else "short_factor"])),
    )


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """The paper's sqrt(1 + ln(s) / ln(L)) for texts up to s times as long as the original context L (Ding et al.
    2024)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0


def _yarn(declared: Json, theta: float, original_context: int, max_context: int) -> RopeConfig:
    factor = float(declared.get("factor") or max_context / original_context)
    attention_factor = declared.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, declared.get("mscale"), declared.get("mscale_all_dim"))
    truncate = declared.get("truncate")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_context=original_context,
        beta_fast=float(declared.get("beta_fast") or 32),
        beta_slow=float(declared.get("beta_slow") or 1),
        attention_factor=float(attention_factor),
        truncate=True if truncate is None else bool(truncate),
    )


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The paper's 0.1 ln(s) + 1, or the ratio of two such terms if the checkpoint weights them."""

    def term(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)


def _eos_ids(directory: Path, raw: Json) -> tuple[int, ...]:
    """End-of-text ids of generation_config.json, else of config.json or its text part; empty if none has them."""
    path, own = directory / "generation_config.json", directory / "config.json"
    places = ((path, read_json(path) if path.exists() else {}), (own, raw), (own, raw.get("text_config")))
    for file, place in places:
        declared = place.get("eos_token_id") if isinstance(place, Mapping) else None
        if declared is not None:
            try:
                return tuple(map(int, declared if isinstance(declared, list) else [declared]))
            except (TypeError, ValueError, OverflowError):
                raise wrong(str(file), "eos_token_id", declared, "a token id or a list of them") from None
    return ()
