"""The weights of a decoder, and the check that a checkpoint has exactly these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from parlay.models.config import DecoderConfig, Experts, LayerForm
from parlay.models.weights.stored import StoredTensor
from parlay.types import ParlayError

Weight = Tensor | StoredTensor
"""One weight of a checkpoint: a tensor, or a file's own blocks."""


class BadCheckpoint(ParlayError):
    """Raised if a checkpoint's files don't have the weights that its config requires."""


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights of a decoder with this config."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    if config.per_layer_size:
        every = config.num_layers * config.per_layer_size
        shapes["model.embed_tokens_per_layer.weight"] = (config.vocab_size, every)
        shapes["model.per_layer_model_projection.weight"] = (every, config.hidden_size)
        shapes["model.per_layer_projection_norm.weight"] = (config.per_layer_size,)
    for layer, form in enumerate(config.forms):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config, form).items()})
    return shapes


def unread(config: DecoderConfig) -> set[str]:
    """Weights that a checkpoint may have but nobody reads: key and value weights of layers that use other layers'
    keys."""
    return {
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer, form in enumerate(config.forms)
        for part in ("k_proj", "v_proj", "k_norm")
        if form.keys_of is not None
    }


def _layer_shapes(config: DecoderConfig, form: LayerForm) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes = _attention_shapes(config, form)
    if form.pre_norms:
        shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if form.post_norms:
        shapes |= {"attention_out_layernorm.weight": (hidden,), "mlp_out_layernorm.weight": (hidden,)}
    if form.out_scale:
        shapes["layer_scalar.weight"] = (1,)
    if config.per_layer_size:
        shapes["per_layer_input_gate.weight"] = (config.per_layer_size, hidden)
        shapes["per_layer_projection.weight"] = (hidden, config.per_layer_size)
        shapes["per_layer_out_layernorm.weight"] = (hidden,)
    if form.experts is None or form.experts.beside:
        shapes |= _gated_shapes("mlp.", hidden, config.mlp_size_of(form))
    return shapes if form.experts is None else shapes | _expert_shapes(hidden, form.experts)


def _attention_shapes(config: DecoderConfig, form: LayerForm) -> dict[str, tuple[int, ...]]:
    hidden, (kv_heads, head_dim) = config.hidden_size, config.heads_of(form)
    query, key = config.num_heads * head_dim, kv_heads * head_dim
    rows = {"q_proj": query, "k_proj": key, "v_proj": key}
    if form.keys_as_values or form.keys_of is not None:
        del rows["v_proj"]
    if form.keys_of is not None:
        del rows["k_proj"]
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{part}.weight": (count, hidden) for part, count in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, query)
    if form.qkv_bias:
        shapes |= {f"self_attn.{part}.bias": (count,) for part, count in rows.items()}
    if form.out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    for part in ("q", "k") if form.qk_norm else ():
        if f"{part}_proj" in rows:
            shapes[f"self_attn.{part}_norm.weight"] = (rows[f"{part}_proj"] if form.wide_qk_norm else head_dim,)
    if form.sinks:
        shapes["self_attn.sinks.weight"] = (config.num_heads,)
    return shapes


def _gated_shapes(at: str, hidden: int, inner: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}gate_proj.weight": (inner, hidden),
        f"{at}up_proj.weight": (inner, hidden),
        f"{at}down_proj.weight": (hidden, inner),
    }
    if bias:
        shapes |= {f"{at}gate_proj.bias": (inner,), f"{at}up_proj.bias": (inner,), f"{at}down_proj.bias": (hidden,)}
    return shapes


def _expert_shapes(hidden: int, experts: Experts) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.count, hidden)}
    if experts.bias:
        shapes["mlp.gate.bias"] = (experts.count,)
    if experts.sigmoid:
        shapes["mlp.gate.e_score_correction_bias"] = (experts.count,)
    for index in range(experts.count):
        shapes |= _gated_shapes(f"mlp.experts.{index}.", hidden, experts.size, experts.bias)
    if experts.shared:
        shapes |= _gated_shapes("mlp.shared_expert.", hidden, experts.shared)
    if experts.shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    if experts.beside:
        norms = ("router_layernorm", "experts_layernorm", "dense_out_layernorm", "experts_out_layernorm")
        shapes |= {f"{name}.weight": (hidden,) for name in norms}
        shapes["mlp.expert_scale.weight"] = (experts.count,)
    return shapes


def check_weights(where: Path, expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Weight]) -> None:
    """Raises BadCheckpoint that names the first missing, extra and mis-shaped weights of the checkpoint at
    ``where``."""
    missing = [name for name in expected if name not in weights]
    extra = [name for name in weights if name not in expected]
    shapes = [
        f"{name} {list(weights[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    faults = {"missing": missing, "extra": extra, "of another shape": shapes}
    lines = [f"{len(names)} {kind}: {some(names)}" for kind, names in faults.items() if names]
    if lines:
        raise BadCheckpoint(f"{where}: the tensors are not those that the config describes: {'; '.join(lines)}")


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few names; as they come from files, unprintable characters are escaped."""
    listed = list(names)
    return ", ".join(name if name.isprintable() else repr(name) for name in listed[:most]) + (
        ", ..." if len(listed) > most else ""
    )
