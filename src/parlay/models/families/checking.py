"""Refuses impossible sizes and numbers of a decoder, from any kind of file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType

from parlay.models.config import DecoderConfig, Experts, RopeConfig
from parlay.types import ParlayError

MOST_LAYERS, _MOST_EXPERTS = 10_000, 1 << 18
_MOST: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_layers": MOST_LAYERS,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_context": 1 << 31,
}
"""The largest counts that fields of `DecoderConfig` may have, several times those of any model. A larger one is a
mistake, or an attempt to use up time and memory."""


def check_forms(source: str, config: DecoderConfig, names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises ParlayError for impossible sizes and numbers of layers; ``source`` is the file that has them.

    ``names``: the file's names of sizes, where they differ from those of `DecoderConfig`.
    """
    _check_sizes(source, config, names)
    for rope, size in dict.fromkeys((form.rope, config.heads_of(form).size) for form in config.forms):
        if rope is not None:
            _check_rope(source, rope, size)
    _check_layers(source, config)
    _check_layer_sizes(source, config)


def _check_sizes(source: str, config: DecoderConfig, names: Mapping[str, str]) -> None:
    declared = asdict(config)
    for name, most in _MOST.items():
        if not 1 <= declared[name] <= most:
            raise wrong(source, names.get(name, name), declared[name], f"at least 1 and at most {most}")
    if config.head_dim % 2:
        raise wrong(source, names.get("head_dim", "head_dim"), config.head_dim, "an even number")
    if config.num_heads % config.num_kv_heads:
        kv_heads = names.get("num_kv_heads", "num_kv_heads")
        raise wrong(source, kv_heads, config.num_kv_heads, f"a divisor of {config.num_heads}, the number of heads")
    if not 0 <= config.rms_norm_eps < math.inf:
        raise wrong(source, names.get("rms_norm_eps", "rms_norm_eps"), config.rms_norm_eps, "a number of at least 0")


def _check_rope(source: str, rope: RopeConfig, head_dim: int) -> None:
    numbers = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    declared = asdict(rope)
    for name in numbers:
        if not 1e-30 < declared[name] < 1e30:  # larger or smaller ones make others infinite or NaN
            raise wrong(source, f"rope {name}", declared[name], "a number above 0")
    if not 1.001 < rope.theta < math.inf:
        raise wrong(source, "rope_theta", rope.theta, "a number above 1")
    if not int(rope.kind == "yarn") <= rope.original_max_context <= _MOST["max_context"]:
        raise wrong(source, "original_max_position_embeddings", rope.original_max_context, "the length of a text")
    if not 0 <= rope.rotated <= head_dim or rope.rotated % 2:
        raise wrong(
            source, "the number of rotated dimensions", rope.rotated, f"even and at most {head_dim}, the size of heads"
        )
    turning = (rope.rotated or head_dim) // 2
    if rope.kind == "divided" and (len(rope.divisors) != turning or not all(0 < d < math.inf for d in rope.divisors)):
        raise wrong(source, "long_factor and short_factor", len(rope.divisors), f"lists of {turning} numbers above 0")
    if not rope.low_freq_factor < rope.high_freq_factor:
        raise wrong(source, "rope low_freq_factor", rope.low_freq_factor, "less than high_freq_factor")


def _check_layers(source: str, config: DecoderConfig) -> None:
    for form in set(config.layers):
        if form.scale is not None and not 0 < form.scale < math.inf:
            raise wrong(source, "the scale of attention scores", form.scale, "a number above 0")
        for name, cap in (("the cap of attention scores", form.score_cap), ("the cap of logits", config.logit_cap)):
            if not 0 <= cap < math.inf:
                raise wrong(source, name, cap, "a number of at least 0")
        scales = {"residual": form.residual_scale, "embedding": config.embedding_scale, "logit": config.logit_scale}
        for name, scale in scales.items():
            if not 0 < scale < math.inf:
                raise wrong(source, f"{name}_multiplier", scale, "a number above 0")
        if form.experts is not None:
            _check_experts(source, form.experts, config.num_layers)


def _check_layer_sizes(source: str, config: DecoderConfig) -> None:
    for form in set(config.layers):
        heads, mlp_size = config.heads_of(form), config.mlp_size_of(form)
        sizes = {"num_kv_heads": heads.heads, "head_dim": heads.size, "intermediate_size": mlp_size}
        for name, size in sizes.items():
            if not 1 <= size <= _MOST[name]:
                raise wrong(source, f"{name} of each layer", size, f"at least 1 and at most {_MOST[name]}")
    if not 0 <= config.per_layer_size <= _MOST["head_dim"]:
        raise wrong(
            source, "hidden_size_per_layer_input", config.per_layer_size, f"at least 0 and at most {_MOST['head_dim']}"
        )


def _check_experts(source: str, experts: Experts, layers: int) -> None:
    if experts.count * layers > _MOST_EXPERTS:
        raise wrong(source, "num_experts", experts.count, f"at most {_MOST_EXPERTS // layers} for {layers} layers")
    if not 1 <= experts.chosen <= experts.count <= MOST_LAYERS:
        raise wrong(
            source,
            "num_experts_per_tok",
            experts.chosen,
            f"at least 1 and at most {experts.count}, the number of experts",
        )
    if experts.count % max(experts.groups, 1) or not 1 <= experts.top_groups <= experts.groups:
        raise wrong(
            source,
            "n_group",
            experts.groups,
            f"a divisor of {experts.count} and at least topk_group, which must be at least 1",
        )
    if experts.chosen > (most := experts.count // experts.groups * experts.top_groups):
        raise wrong(
            source, "num_experts_per_tok", experts.chosen, f"at most {most}, the experts of its topk_group groups"
        )
    if not 0 < experts.scale < math.inf:
        raise wrong(source, "routed_scaling_factor", experts.scale, "a number above 0")
    for name, size in (("experts", experts.size), ("a shared expert", experts.shared or 1)):
        if not 1 <= size <= _MOST["intermediate_size"]:
            raise wrong(source, f"the size of {name}", size, f"at least 1 and at most {_MOST['intermediate_size']}")


def wrong(source: str, name: str, value: object, expected: str) -> ParlayError:
    """The error for a wrong value in ``source``; ``expected`` says what is allowed."""
    return ParlayError(f"{source}: {name} must be {expected}, got {value!s:.40}")
