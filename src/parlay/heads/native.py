"""A head's layer as a native decoder: it runs on the same kernels as the target's layers, with a cache of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig, HeadForm
from parlay.models.fused import Operand, as_tensor

_LAYER = "model.layers.0."
_PRODUCTS = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
)
_NORM = "post_attention_layernorm.weight"


def eagle3_decoder(
    layer: DecoderConfig, tensors: Mapping[str, Tensor], embedding: Operand
) -> tuple[DecoderConfig, dict[str, Operand]]:
    """The layer of an `Eagle3Head` as a decoder's config and weights; see `_decoder`."""
    norms = {
        "model.norm.weight": "norm.weight",
        _LAYER + "beside_layernorm.weight": "midlayer.input_layernorm.weight",
        _LAYER + "input_layernorm.weight": "midlayer.hidden_norm.weight",
    }
    return _decoder(layer, tensors, embedding, "midlayer.", norms, beside=True)


def eagle_decoder(
    layer: DecoderConfig, tensors: Mapping[str, Tensor], embedding: Operand
) -> tuple[DecoderConfig, dict[str, Operand]]:
    """The layer of an `EagleHead` as a decoder's config and weights; see `_decoder`."""
    return _decoder(layer, tensors, embedding, "layers.0.", {}, bare=True)


def mtp_decoder(
    layer: DecoderConfig, tensors: Mapping[str, Tensor], embedding: Operand
) -> tuple[DecoderConfig, dict[str, Operand]]:
    """The block of an `MtpModule` as a decoder's config and weights; see `_decoder`."""
    norms = {"model.norm.weight": "norm.weight", _LAYER + "input_layernorm.weight": "block.input_layernorm.weight"}
    return _decoder(layer, tensors, embedding, "block.", norms)


def _decoder(
    layer: DecoderConfig,
    tensors: Mapping[str, Tensor],
    embedding: Operand,
    prefix: str,
    norms: Mapping[str, str],
    *,
    beside: bool = False,
    bare: bool = False,
) -> tuple[DecoderConfig, dict[str, Operand]]:
    """``layer`` is the shape of the head's layer, whose tensors begin with ``prefix``; ``norms`` are other names.

    ``embedding`` ``[V, H]`` is the target's. A head without an LM head of its own reads these rows of it.
    """
    ids_D = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    head_DH = tensors["lm_head.weight"] if "lm_head.weight" in tensors else as_tensor(embedding, torch.float32)[ids_D]
    form = HeadForm(draft_vocab_size=len(ids_D), beside=beside, bare=bare)
    decoder = replace(layer, num_layers=1, head=form, tie_embeddings=False)
    names = {**norms, **{_LAYER + name: prefix + name for name in (*_PRODUCTS, _NORM)}}
    found = {to: tensors[of] for to, of in names.items()}
    return decoder, {"model.embed_tokens.weight": embedding, "lm_head.weight": head_DH, **found}
