"""Converts a head's layers to a native decoder, which runs on the target's kernels with its own cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import draft_ids
from parlay.heads.eagle3 import normed
from parlay.heads.layer import RmsNorm
from parlay.models.config import DecoderConfig, HeadForm
from parlay.models.weights.fused import Operand, as_tensor, chosen_rows

_LAYER = "model.layers.{}."
_PRODUCTS = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
)
_BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")
_QK_NORMS = tuple(f"self_attn.{part}_norm.weight" for part in "qk")
_FEW = 2  # rows of an LM head that is never used
_IDLE = 32  # width of an MLP that adds nothing
_NORM = "post_attention_layernorm.weight"
_FIRST_NORM, _BESIDE_NORM, _LAST_NORM = "input_layernorm.weight", "hidden_norm.weight", "norm.weight"

LayersOfHead: TypeAlias = tuple[DecoderConfig, dict[str, Operand]]
"""A head's layers as a decoder: its config, and its weights under a checkpoint's names."""


def eagle3_decoder(
    layer: DecoderConfig, tensors: Mapping[str, Operand], embedding: Operand, ids_D: Tensor, *, normed: bool = False
) -> LayersOfHead:
    """Convert the layer of an `Eagle3Head` with the outputs ``ids_D``; see `_decoder`. With ``normed``, its rows read
    hidden states after `input_norm`."""
    return _decoder(layer, tensors, embedding, ("midlayer.",), ids_D=ids_D, beside=True, normed=normed)


def eagle_decoder(layer: DecoderConfig, tensors: Mapping[str, Operand], embedding: Operand) -> LayersOfHead:
    """Convert the layer of an `EagleHead`; see `_decoder`."""
    return _decoder(layer, tensors, embedding, ("layers.0.",), bare=True)


def mtp_decoder(layer: DecoderConfig, tensors: Mapping[str, Operand], embedding: Operand) -> LayersOfHead:
    """Convert the block of an `MtpModule`; see `_decoder`."""
    return _decoder(layer, tensors, embedding, ("block.",))


def parallel_decoder(
    layer: DecoderConfig, tensors: Mapping[str, Operand], embedding: Operand, head: int
) -> LayersOfHead:
    """Convert layer ``head`` of `ParallelHeads`; see `_decoder`."""
    return _decoder(layer, tensors, embedding, (f"blocks.{head}.",))


def prefix_decoder(layer: DecoderConfig, tensors: Mapping[str, Operand], embedding: Operand) -> LayersOfHead:
    """Convert the prefix layer of `HydraHeads`. The decoder's logits are never used, so its LM head has only a few
    rows."""
    d2t = as_tensor(tensors["d2t"], torch.int64)[:_FEW]
    few: dict[str, Operand] = {**tensors, "d2t": d2t, "lm_head.weight": torch.zeros(_FEW, layer.hidden_size)}
    few[_LAST_NORM] = torch.ones(layer.hidden_size)
    return _decoder(layer, few, embedding, ("prefix.",))


def kangaroo_decoder(layer: DecoderConfig, tensors: Mapping[str, Operand], embedding: Operand) -> LayersOfHead:
    """Convert a `KangarooAdapter`; its MLP adds nothing. See `_decoder`."""
    size = layer.hidden_size
    mlp = {"gate": (_IDLE, size), "up": (_IDLE, size), "down": (size, _IDLE)}
    idle = {f"mlp.{part}_proj.weight": torch.zeros(shape) for part, shape in mlp.items()}
    operands = {**tensors, **idle, _NORM: torch.ones(size)}
    return _decoder(replace(layer, intermediate_size=_IDLE), operands, embedding, ("",))


def block_decoder(
    layer: DecoderConfig, tensors: Mapping[str, Operand], embedding: Operand, layers: int, *, normed: bool = False
) -> LayersOfHead:
    """Convert the ``layers`` layers of a `BlockHead`; see `eagle3_decoder`."""
    prefixes = [f"layers.{place}." for place in range(layers)]
    return _decoder(layer, tensors, embedding, prefixes, beside=True, normed=normed)


def input_norm(artefact: HeadArtefact, name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that norms hidden states ``[K, H]`` for an artefact's first layer; ``name`` is the norm's
    weight.

    It changes nothing if the head is not `normed`.
    """
    if not normed(artefact):
        return lambda hidden_KH: hidden_KH
    norm = RmsNorm(artefact.layer.hidden_size, artefact.layer.rms_norm_eps)
    norm.load_state_dict({"weight": artefact.tensors[name]})
    return norm.requires_grad_(False)


def _decoder(
    layer: DecoderConfig,
    tensors: Mapping[str, Operand],
    embedding: Operand,
    prefixes: Sequence[str],
    *,
    ids_D: Tensor | None = None,
    beside: bool = False,
    bare: bool = False,
    normed: bool = False,
) -> LayersOfHead:
    """Convert a head's layers to a decoder. ``layer`` is their shape; each layer's tensors begin with its prefix.

    With ``beside``, the first layer has a second norm (for hidden states, next to embeddings). With ``bare``, it has no
    norm before attention, and there is no final norm. ``embedding`` ``[V, H]`` is the target's. A head without its own
    LM head uses the embedding's rows of its outputs, which are the tokens ``ids_D``, or else its draft vocabulary.
    """
    if ids_D is None:
        ids_D = draft_ids(as_tensor(tensors["d2t"], torch.int64))
    head_DH = tensors["lm_head.weight"] if "lm_head.weight" in tensors else chosen_rows(embedding, ids_D)
    form = HeadForm(draft_vocab_size=len(ids_D), beside=beside, bare=bare, normed=normed)
    decoder = replace(layer.plain, num_layers=len(prefixes), head=form, tie_embeddings=False)
    of_a_layer = (*_PRODUCTS, _NORM, *(_BIASES if layer.qkv_bias else ()), *(_QK_NORMS if layer.qk_norm else ()))
    names = {} if bare else {"model.norm.weight": _LAST_NORM}
    for place, prefix in enumerate(prefixes):
        own = _LAYER.format(place)
        names |= {own + name: prefix + name for name in of_a_layer}
        if place == 0 and beside:
            names |= {own + "beside_layernorm.weight": prefix + _FIRST_NORM, own + _FIRST_NORM: prefix + _BESIDE_NORM}
        elif not bare:
            names[own + _FIRST_NORM] = prefix + _FIRST_NORM
    found = {to: tensors[of] for to, of in names.items()}
    return decoder, {"model.embed_tokens.weight": embedding, "lm_head.weight": head_DH, **found}
