"""Which weights a decoder has, and whether a checkpoint holds these and no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from parlay.models.config import DecoderConfig, LayerForm
from parlay.models.weights.stored import StoredTensor
from parlay.types import ParlayError

Weight = Tensor | StoredTensor
"""One weight of a checkpoint: as numbers, or in a file's own blocks."""


class BadCheckpoint(ParlayError):
    """The files of a checkpoint don't hold the weights that its config calls for."""


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a decoder of this config has."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer, form in enumerate(config.forms):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config, form).items()})
    return shapes


def _layer_shapes(config: DecoderConfig, form: LayerForm) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if form.post_norms:
        shapes |= {"attention_out_layernorm.weight": (hidden,), "mlp_out_layernorm.weight": (hidden,)}
    if form.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (key,), "self_attn.v_proj.bias": (key,)}
    if form.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def check_weights(where: Path, expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Weight]) -> None:
    """Raises BadCheckpoint naming the first missing, extra and mis-shaped weights of the checkpoint at ``where``."""
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
        raise BadCheckpoint(f"{where}: the tensors don't match the config; {'; '.join(lines)}")


def some(names: Iterable[str], most: int = 3) -> str:
    """The first few; names come from files, so one that a terminal would act on is spelled out."""
    listed = list(names)
    return ", ".join(name if name.isprintable() else repr(name) for name in listed[:most]) + (
        ", ..." if len(listed) > most else ""
    )
