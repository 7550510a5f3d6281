"""Gemma 4: sliding and full layers differ in their heads, and values are normed, too.

The last layers may share an earlier layer's keys, full layers may use keys as values, and each layer may read per-token
numbers of its own (the E models).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from parlay.models.config import DecoderConfig, Experts, Json, LayerForm, RopeConfig, UnsupportedModel
from parlay.models.families.family import IMAGES, TEXT_PREFIXES, Family, GgufForm, all_but_every, windows_by_type
from parlay.models.families.gemma import POST_NORMS

_USUAL = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
"""Defaults of the config."""
_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
_NEVER = 1e30
"""The divisor of the frequencies of pairs that are not rotated, as in GGUF files."""
_PATTERN, _LONGEST_HEAD = 6, 1 << 14
_OF_LAYERS = ("head_dim", "num_key_value_heads")
"""The fields that ``per_layer_config`` may set for a layer."""


def _text(raw: Json) -> Json:
    """The text model's part of config.json, with the rotary parameters of sliding layers as its own."""
    declared = {**_USUAL, "torch_dtype": raw.get("torch_dtype"), **raw.get("text_config", raw)}
    if declared.get("use_bidirectional_attention") == "vision":  # only within an image
        declared["use_bidirectional_attention"] = None
    ropes = declared.get("rope_parameters") or {}
    local = dict(ropes.get("sliding_attention") or {})
    if local.pop("partial_rotary_factor", 1.0) != 1:
        raise UnsupportedModel("Gemma 4: sliding layers that turn heads in part are not supported")
    declared["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, **local}
    declared["full_rope"] = ropes.get("full_attention") or _FULL_ROPE
    return declared


def _proportional(declared: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Rotary parameters of full layers: a share of the pairs rotates, each at the frequency that it would have if all
    did."""
    kind, theta = declared.get("rope_type", "default"), float(declared.get("rope_theta", _FULL_ROPE["rope_theta"]))
    if kind not in ("default", "proportional"):
        raise UnsupportedModel(f"Gemma 4: positions of full layers scaled by {kind!r:.40} are not supported")
    if kind == "default":
        if (declared.get("partial_rotary_factor") or 1.0, declared.get("factor") or 1.0) != (1.0, 1.0):
            raise UnsupportedModel("Gemma 4: positions of full layers that turn heads in part must be 'proportional'")
        return RopeConfig(theta=theta)
    turning = int(float(declared.get("partial_rotary_factor", 1.0)) * head_dim // 2)
    divisors = [float(declared.get("factor", 1.0))] * turning + [_NEVER] * (head_dim // 2 - turning)
    return RopeConfig(theta=theta, kind="divided", divisors=tuple(divisors))


def _heads_of(raw: Json, layer: int, slides: bool) -> tuple[int, int]:
    """A layer's number of key heads and their size, from ``per_layer_config`` or the layer's type."""
    own = raw.get("per_layer_config")
    count, size = int(raw["num_key_value_heads"]), int(raw["head_dim"])
    if own is not None:
        declared = own.get(str(layer), own.get(layer)) or {}
        if strange := [name for name in declared if name not in _OF_LAYERS]:
            raise UnsupportedModel(f"Gemma 4: per_layer_config with {strange[0]!s:.40} is not supported")
        return int(declared.get("num_key_value_heads", count)), int(declared.get("head_dim", size))
    if slides:
        return count, size
    if raw.get("attention_k_eq_v"):
        count = int(raw.get("num_global_key_value_heads") or count)
    return count, int(raw.get("global_head_dim") or 512)


def _source(kinds: Sequence[str], layer: int, own: int) -> int | None:
    """The layer whose keys ``layer`` uses: the last one of its type among the first ``own`` layers, which have keys."""
    if layer < own:
        return None
    found = [earlier for earlier in range(own) if kinds[earlier] == kinds[layer]]
    if not found:
        raise ValueError(f"layer {layer} sees keys of {kinds[layer]}, and no earlier layer has such")
    return found[-1]


def _gemma4(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    config = replace(
        config,
        num_kv_heads=int(raw["num_key_value_heads"]),
        head_dim=int(raw["head_dim"]),
        intermediate_size=int(raw["intermediate_size"]),
        rope=raw.get("local_rope", config.rope),
    )
    layers = config.num_layers
    if not all(0 <= int(name) < layers for name in raw.get("per_layer_config") or {}):
        raise ValueError("per_layer_config names layers that are not there")
    per_layer, vocabulary = int(raw["hidden_size_per_layer_input"] or 0), raw.get("vocab_size_per_layer_input")
    if per_layer and vocabulary not in (None, config.vocab_size):
        raise UnsupportedModel(
            f"{config.architecture}: vocab_size_per_layer_input {vocabulary} beside a vocab_size of {config.vocab_size}"
        )
    slides = all_but_every(_PATTERN, layers)
    windows = windows_by_type(raw, config, min(int(raw["sliding_window"]), config.max_context), slides)
    if len(windows) != layers or any(window is not None and window < 1 for window in windows):
        raise ValueError(f"layer_types and sliding_window {raw['sliding_window']} describe no {layers} layers")
    windows[-1] = None  # whatever its type says
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    own = layers - int(raw.get("num_kv_shared_layers") or 0)
    if not 0 < own <= layers:
        raise ValueError(f"num_kv_shared_layers {raw['num_kv_shared_layers']} of {layers} layers")
    form = replace(usual, post_norms=True, value_norm=True, scale=1.0, out_scale=True, experts=_experts(raw))
    placed = [replace(form, window=windows[layer], keys_of=_source(kinds, layer, own)) for layer in range(layers)]
    forms = [_form(raw, config, layer, each) for layer, each in enumerate(placed)]
    _check_types(forms)
    return replace(
        config,
        layers=tuple(forms),
        embedding_scale=config.hidden_size**0.5,
        logit_cap=float(raw.get("final_logit_softcapping") or 0),
        per_layer_size=per_layer,
    )


def _experts(raw: Json) -> Experts | None:
    if not raw.get("enable_moe_block"):
        return None
    sizes = (int(raw[name]) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    count, chosen, size = sizes
    return Experts(count=count, chosen=chosen, size=size, beside=True)


def _form(raw: Json, config: DecoderConfig, layer: int, form: LayerForm) -> LayerForm:
    """The form of a layer; ``form`` has its window and the source of its keys."""
    full, alone = raw["full_rope"], form.keys_of is None
    kv_heads, head_dim = _heads_of(raw, layer, form.window is not None)
    if not 0 < head_dim <= _LONGEST_HEAD or head_dim % 2 or kv_heads < 1 or config.num_heads % kv_heads:
        raise ValueError(f"layer {layer} has {config.num_heads} heads over {kv_heads} of {head_dim} numbers")
    rope = config.rope if form.window else full if isinstance(full, RopeConfig) else _proportional(full, head_dim)
    return replace(
        form,
        rope=rope,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=None if alone or not raw.get("use_double_wide_mlp") else 2 * config.intermediate_size,
        keys_as_values=bool(raw.get("attention_k_eq_v")) and form.window is None and alone,
    )


def _check_types(forms: Sequence[LayerForm]) -> None:
    """Raises UnsupportedModel unless layers of one type have the same heads, as they share cache pages."""
    for kind in ({form for form in forms if form.window}, {form for form in forms if not form.window}):
        if len({(form.kv_heads, form.head_dim) for form in kind}) > 1:
            raise UnsupportedModel("Gemma 4: layers of one type that differ in their heads are not supported")


def _of_files(raw: Json, config: DecoderConfig, tensors: Collection[str]) -> Json:
    """A GGUF file's keys under config.json's names. The file's rotary parameters and head sizes are those of full
    layers."""
    layers, size = config.num_layers, int(raw.get("local_head_dim", config.head_dim))
    kinds = list(raw.get("layer_types") or ["full_attention"] * layers)
    own = layers - int(raw.get("num_kv_shared_layers") or 0)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    counts = _each(raw.get("kv_heads", config.num_heads), layers)
    sizes = _each(raw.get("mlp_sizes", config.intermediate_size), layers)
    double = sizes[-1] != sizes[0]
    if sizes != [sizes[0] * (2 if double and layer >= own else 1) for layer in range(layers)]:
        raise UnsupportedModel(
            f"gemma4: feed_forward_length {sizes} is not supported: layers that share keys may double it"
        )
    if raw.get("local_value_dim", size) != size or raw.get("local_rotated", size) != size:
        raise UnsupportedModel(
            "gemma4: sliding layers that turn heads in part, or have other values, are not supported"
        )
    sliding = next((count for count, kind in zip(counts, kinds, strict=True) if kind != "full_attention"), counts[0])
    return {
        "sliding_window": config.max_context,
        "hidden_size_per_layer_input": 0,
        **raw,
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_key_value_heads": sliding,
        "head_dim": size,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": double,
        "per_layer_config": {
            layer: {"num_key_value_heads": counts[layer], "head_dim": config.head_dim} for layer in full
        },
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in tensors for layer in full if layer < own),
        "full_rope": config.rope,
        "local_rope": RopeConfig(theta=float(raw.get("local_theta", 10_000.0))),
        "enable_moe_block": bool(raw.get("num_experts")),
    }


def _each(value: Any, layers: int) -> list[int]:
    """One number per layer, from one for all or a list."""
    found = [int(each) for each in value] if isinstance(value, list | tuple) else [int(value)] * layers
    if len(found) != layers:
        raise ValueError(f"{len(found)} numbers for {layers} layers")
    return found


GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    models="Gemma 4 as a text model",
    max_context=131_072,
    qk_norm=True,
    tie_embeddings=True,
    activation="gelu_pytorch_tanh",
    complete=_gemma4,
    normalize=_text,
    keys=(
        *("final_logit_softcapping", "full_rope", "per_layer_config", "global_head_dim", "num_global_key_value_heads"),
        *("attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp", "enable_moe_block", "num_experts"),
        *("top_k_experts", "moe_intermediate_size", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    ),
    prefixes=TEXT_PREFIXES,
    names={
        "post_feedforward_layernorm_1": "dense_out_layernorm",
        "post_feedforward_layernorm_2": "experts_out_layernorm",
        "pre_feedforward_layernorm_2": "experts_layernorm",
        ".router.scale": ".router_layernorm.weight",
        ".router.proj": ".mlp.gate",
        ".router.per_expert_scale": ".mlp.expert_scale.weight",
        ".experts.gate_up_proj": ".mlp.experts.gate_up_proj.weight",
        ".experts.down_proj": ".mlp.experts.down_proj.weight",
        **POST_NORMS,
        "post_per_layer_input_norm": "per_layer_out_layernorm",
        ".layer_scalar": ".layer_scalar.weight",
    },
    left_out=(*IMAGES, "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    gguf=GgufForm(
        "gemma4",
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.key_length_swa": "local_head_dim",
            "attention.value_length_swa": "local_value_dim",
            "attention.head_count_kv": "kv_heads",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "rope.dimension_count_swa": "local_rotated",
            "rope.freq_base_swa": "local_theta",
            "feed_forward_length": "mlp_sizes",
            "final_logit_softcapping": "final_logit_softcapping",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        normalize=_of_files,
        lists=("attention.head_count_kv", "feed_forward_length"),
    ),
)
GEMMA4_IMAGES = replace(
    GEMMA4,
    architecture="Gemma4ForConditionalGeneration",
    models="Gemma 4 E2B to 31B",
    gguf=None,
    note="text only; in GGUF files it is gemma4",
)
