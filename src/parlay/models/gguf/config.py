"""Reads a GGUF file's keys as a `DecoderConfig`. Keys that the native decoder does not support are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from parlay.models.config import DecoderConfig, RopeConfig, UnsupportedModel
from parlay.models.families.checking import check_forms
from parlay.models.families.family import Family, GgufForm, all_but_every
from parlay.models.families.reading import ACTIVATIONS, yarn_attention_factor
from parlay.models.families.table import GGUF_FAMILIES
from parlay.models.gguf.reader import BadGguf, Strings, TensorInfo, Value
from parlay.models.weights.shapes import some
from parlay.types import CanvasSpec, ParlayError

Tensors = Mapping[str, TensorInfo]

_LARGEST = 1 << 31
PATTERN = "attention.sliding_window_pattern"
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"


class RopeFactors(NamedTuple):
    """Divisors of rotary frequencies from the tensor ``name``; ``short``: for texts that fit the original context.

    ``scaled``: there are separate ones for short and long texts (longrope).
    """

    name: str = ROPE_FACTORS
    divisors: tuple[float, ...] = ()

    @property
    def short(self) -> bool:
        return self.name == SHORT_FACTORS

    @property
    def scaled(self) -> bool:
        return self.name in (SHORT_FACTORS, LONG_FACTORS)


_READ = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        PATTERN,
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
"""Keys of an architecture that are used below, or that a decoder does not need (``finetuned``)."""
_NAMES = {
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_context": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Keys of an architecture by fields of `DecoderConfig`."""
_NEUTRAL: Mapping[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 1,
    "use_parallel_residual": False,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "tensor_data_layout": "Meta AI original pth",
}
"""Keys that are accepted only with this value, which changes nothing."""


class _Keys:
    """Reads the keys of one architecture with their types; errors name missing ones."""

    def __init__(self, keys: Mapping[str, Value], architecture: str, lists: Collection[str] = ()) -> None:
        """Keys in ``lists`` may have one number per layer, which the family itself reads."""
        self._keys, self._prefix, self._lists = keys, f"{architecture}.", lists

    def names(self) -> dict[str, Value]:
        """The architecture's keys, without its prefix."""
        start = len(self._prefix)
        return {key[start:]: value for key, value in self._keys.items() if key.startswith(self._prefix)}

    def size(self, name: str, default: int | None = None) -> int:
        """Read a count of at least one."""
        value = self._keys.get(self._prefix + name, default)
        if value is None:
            raise BadGguf(f"the key {self._prefix}{name} is missing")
        if isinstance(value, tuple) and value and name in self._lists:
            value = value[0]
        if isinstance(value, tuple):
            raise UnsupportedModel(f"{self._prefix}{name} is a list: layers that differ are not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise BadGguf(f"the key {self._prefix}{name} is {value!r:.40}; expected a number from 1 to {_LARGEST}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number above zero."""
        value = self._keys.get(self._prefix + name, default)
        if value is None:
            raise BadGguf(f"the key {self._prefix}{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise BadGguf(f"the key {self._prefix}{name} is {value!r:.40}; expected a number above 0")
        return float(value)


def family_of(keys: Mapping[str, Value]) -> Family:
    """The family that the file's keys name. Raises BadGguf if none is named, UnsupportedModel if it is unknown."""
    kind = keys.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"the file holds no model: its general.type is {kind!r:.40}")
    name = keys.get("general.architecture")
    if not isinstance(name, str):
        raise BadGguf("the key general.architecture is missing")
    if name not in GGUF_FAMILIES:
        raise UnsupportedModel(
            f"architecture {name!r:.40}: of GGUF files the native decoder runs {', '.join(GGUF_FAMILIES)}"
        )
    return GGUF_FAMILIES[name]


def original_context(keys: Mapping[str, Value]) -> int:
    """The context length before positions were scaled; 0 if the file does not say."""
    declared = keys.get(f"{keys.get('general.architecture')}.rope.scaling.original_context_length", 0)
    return declared if isinstance(declared, int) else 0


def decoder_config(keys: Mapping[str, Value], tensors: Tensors, factors: RopeFactors) -> DecoderConfig:
    """The decoder described by a file's keys and tensors; ``factors`` are its rotary factors.

    Raises BadGguf or UnsupportedModel, in one line.
    """
    family = family_of(keys)
    name = str(keys["general.architecture"])
    form = family.gguf
    assert form is not None, "families of files have one"
    mine = _Keys(keys, name, form.lists)
    _refuse_unknown(name, mine.names(), family)
    heads, kv_heads = _head_counts(name, mine)
    hidden = mine.size("embedding_length")
    head_dim = _head_dim(mine, hidden // heads)
    max_context = _max_context(name, mine, form, factors)
    config = DecoderConfig(
        architecture=family.architecture,
        vocab_size=(vocab_size := _vocabulary(keys, mine)),
        hidden_size=hidden,
        intermediate_size=mine.size("feed_forward_length", _size_of_experts(mine)),
        num_layers=_layer_count(name, mine, tensors),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=mine.number("attention.layer_norm_rms_epsilon"),
        max_context=max_context,
        rope=_rope(name, mine, form, factors, max_context=max_context, head_dim=head_dim),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=family.qk_norm,
        eos_ids=_eos_ids(keys),
        dtype="bfloat16",
        canvas=_canvas(keys, family, vocab_size),
    )
    if not family.canvas:
        return _completed(name, mine, tensors, family, config)
    check_forms(f"the keys of {name}", config, _NAMES)
    return config


def _completed(name: str, mine: _Keys, tensors: Tensors, family: Family, config: DecoderConfig) -> DecoderConfig:
    """Complete the config with the family's own keys, read as its config.json would be."""
    form = family.gguf
    assert form is not None, "families of files have one"
    declared = mine.names()
    own: dict[str, object] = {ours: declared[key] for key, ours in form.keys.items() if key in declared}
    if PATTERN in declared:
        own["layer_types"] = _layer_types(declared[PATTERN], config.num_layers)
    try:
        usual = replace(
            config.llama,
            activation=ACTIVATIONS[family.activation],
            out_bias="blk.0.attn_output.bias" in tensors,
        )
        complete = family.complete(form.normalize(own, config, tensors.keys()), config, usual)
    except UnsupportedModel:
        raise
    except (ParlayError, TypeError, ValueError, ArithmeticError) as error:
        raise BadGguf(f"the keys of {name} describe no {family.architecture}: {error}") from None
    check_forms(f"the keys of {name}", complete, _NAMES)
    return complete


def _layer_types(pattern: Value, layers: int) -> list[str]:
    """Which layers slide, from a list or from the period whose last layer sees all keys."""
    whole = isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0
    slide = all_but_every(int(pattern), layers) if whole and isinstance(pattern, int) else pattern
    if not isinstance(slide, list | tuple) or len(slide) != layers:
        raise BadGguf(
            f"the key {PATTERN} is {pattern!r:.40}; expected a period, or one word for each of {layers} layers"
        )
    return ["sliding_attention" if slides else "full_attention" for slides in slide]


def _size_of_experts(mine: _Keys) -> int | None:
    """The inner size of experts; files of models without dense layers may omit the other inner size."""
    value = mine.names().get("expert_feed_forward_length")
    return value if isinstance(value, int) else None


def _canvas(keys: Mapping[str, Value], family: Family, vocab_size: int) -> CanvasSpec | None:
    """How a diffusion model fills canvases; the file may name its mask, and the row that predicts a place."""
    if family.canvas is None:
        return None
    mask = keys.get("tokenizer.ggml.mask_token_id", family.canvas.mask_id)
    shift = keys.get("diffusion.shift_logits", family.canvas.shift)
    if not isinstance(mask, int) or not 0 <= mask < vocab_size or not isinstance(shift, bool):
        raise BadGguf(f"mask {mask!r:.40} in a vocabulary of {vocab_size}, diffusion.shift_logits {shift!r:.40}")
    return family.canvas._replace(mask_id=mask, shift=shift)


def _head_counts(architecture: str, mine: _Keys) -> tuple[int, int]:
    """The numbers of query heads and of key-value heads."""
    heads = mine.size("attention.head_count")
    kv_heads = mine.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"{architecture}: {heads} heads over {kv_heads} key-value heads are not supported")
    return heads, kv_heads


def _layer_count(architecture: str, mine: _Keys, tensors: Tensors) -> int:
    layers = mine.size("block_count")
    if layers > len(tensors):
        raise BadGguf(f"the key {architecture}.block_count is {layers}, and there are {len(tensors)} tensors")
    return layers


def _max_context(architecture: str, mine: _Keys, form: GgufForm, factors: RopeFactors) -> int:
    """The longest text; with factors for short texts only, the original context."""
    max_context, key = mine.size("context_length"), "attention.sliding_window"
    window = mine.names().get(key, 0)
    if factors.short:
        return min(max_context, mine.size("rope.scaling.original_context_length", max_context))
    if window and key not in form.keys and mine.size("attention.sliding_window") < max_context:
        raise UnsupportedModel(
            f"{architecture}: a sliding window of {window} tokens is not supported by the native decoder"
        )
    return max_context


def _refuse_unknown(architecture: str, names: Mapping[str, Value], family: Family) -> None:
    neutral = {**_NEUTRAL, "attention.causal": family.canvas is None}
    read = _READ | (family.gguf.keys.keys() if family.gguf else set())
    for name, value in names.items():
        if name in read or (name in neutral and value == neutral[name]):
            continue
        key = f"{architecture}.{name}"
        shown = f"{value!r:.40}" if not isinstance(value, Strings) else "a list"
        raise UnsupportedModel(f"the key {some([key])} ({shown}) is not supported by the native decoder")


def _head_dim(mine: _Keys, default: int) -> int:
    head_dim = mine.size("attention.key_length", max(default, 1))
    of_values = mine.size("attention.value_length", head_dim)
    if of_values != head_dim:
        raise UnsupportedModel(f"heads of {head_dim} numbers with values of {of_values} are not supported")
    if head_dim % 2:
        raise BadGguf(f"heads have {head_dim} numbers: expected an even number")
    return head_dim


def _vocabulary(keys: Mapping[str, Value], mine: _Keys) -> int:
    tokens = keys.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, Strings) and len(tokens) else mine.size("vocab_size")


def _rope(
    name: str, mine: _Keys, form: GgufForm, factors: RopeFactors, *, max_context: int, head_dim: int
) -> RopeConfig:
    rotated = mine.size("rope.dimension_count", head_dim)
    if rotated % 2 or rotated > head_dim:
        raise BadGguf(f"positions rotate {rotated} numbers: expected an even number up to {head_dim}")
    theta = mine.number("rope.freq_base", 10_000.0)
    declared = mine.names()
    kind = declared.get("rope.scaling.type", "linear" if "rope.scale_linear" in declared else "none")
    if factors.divisors:
        if kind not in ("none", "longrope"):
            raise UnsupportedModel(f"{name}: {factors.name} together with rope scaling {kind!r:.40} is not supported")
        rope = _divided(mine, theta, rotated // 2, factors)
    elif str(kind) in _ROPES:
        rope = replace(_ROPES[str(kind)](mine, theta, max_context), truncate=form.truncate)
    else:
        raise UnsupportedModel(f"{name}: rope scaling {kind!r:.40} is not supported by the native decoder")
    return replace(rope, rotated=0 if rotated == head_dim else rotated)


def _divided(mine: _Keys, theta: float, count: int, factors: RopeFactors) -> RopeConfig:
    if len(factors.divisors) != count or not all(0 < factor < math.inf for factor in factors.divisors):
        raise BadGguf(f"{factors.name} holds no {count} factors above 0")
    attention_factor = mine.number("rope.scaling.attn_factor", 1.0) if factors.scaled else 1.0
    return RopeConfig(theta=theta, kind="divided", divisors=factors.divisors, attention_factor=attention_factor)


def _plain(mine: _Keys, theta: float, max_context: int) -> RopeConfig:
    return RopeConfig(theta=theta)


def _linear(mine: _Keys, theta: float, max_context: int) -> RopeConfig:
    factor = mine.number("rope.scaling.factor", mine.number("rope.scale_linear", 1.0))
    return RopeConfig(theta=theta, kind="linear", factor=factor)


def _yarn(mine: _Keys, theta: float, max_context: int) -> RopeConfig:
    original = mine.size("rope.scaling.original_context_length", max_context)
    factor = mine.number("rope.scaling.factor", max_context / original)
    weight = mine.number("rope.scaling.attn_factor", 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_context=original,
        beta_fast=mine.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=mine.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=weight * yarn_attention_factor(factor),
    )


_ROPES: Mapping[str, Callable[[_Keys, float, int], RopeConfig]] = {"none": _plain, "linear": _linear, "yarn": _yarn}


def _eos_ids(keys: Mapping[str, Value]) -> tuple[int, ...]:
    """The ids that end a text, a turn, a message, or the middle of a file, without duplicates."""
    names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    named = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    listed = [keys.get(f"tokenizer.ggml.{name}_token_ids") for name in names]
    found = [*named, *(value for each in listed if isinstance(each, tuple) for value in each)]
    return tuple(dict.fromkeys(value for value in found if isinstance(value, int)))
