"""A head's layer as a native decoder: it runs on the same kernels as the target's layers, with a cache of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from parlay.heads.eagle3 import Eagle3Config
from parlay.models.config import DecoderConfig, HeadForm
from parlay.models.fused import Operand, as_tensor

_LAYER = "model.layers.0."


def eagle3_decoder(
    config: Eagle3Config, tensors: Mapping[str, Tensor], embedding: Operand
) -> tuple[DecoderConfig, dict[str, Operand]]:
    """The layer of an `Eagle3Head` as a decoder's config and weights; ``embedding`` ``[V, H]`` is the target's.

    A head without an LM head of its own reads these rows of the target's tied embedding.
    """
    if "lm_head.weight" not in tensors:
        ids_D = tensors["d2t"] + torch.arange(config.draft_vocab_size)
        tensors = {**tensors, "lm_head.weight": as_tensor(embedding, torch.float32)[ids_D]}
    form = HeadForm(draft_vocab_size=config.draft_vocab_size, beside=True)
    decoder = replace(config.layer, num_layers=1, head=form, tie_embeddings=False)
    names = {
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
        _LAYER + "beside_layernorm.weight": "midlayer.input_layernorm.weight",
        _LAYER + "input_layernorm.weight": "midlayer.hidden_norm.weight",
        _LAYER + "post_attention_layernorm.weight": "midlayer.post_attention_layernorm.weight",
    }
    attention = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    mlp = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    names |= {_LAYER + name: f"midlayer.{name}" for name in (*attention, *mlp)}
    return decoder, {"model.embed_tokens.weight": embedding, **{to: tensors[of] for to, of in names.items()}}
