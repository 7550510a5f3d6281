"""A checkpoint's weights, grouped as every decoder packs them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.weights.dequantize import dense
from parlay.models.weights.quantize import Int8Weight
from parlay.models.weights.shapes import Weight
from parlay.models.weights.stored import StoredTensor

Operand = Weight | Int8Weight
"""A weight as decoders take it: as in the checkpoint, or to be rounded."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms over n numbers carry sqrt(n) times the checkpoint's weight.

    ``qkv`` are the weights of queries, keys and values, ``qkv_bias`` what is added to them, ``qk_norm`` the norms of
    each query and each key head, and ``out_norms`` those of what attention and feed-forward give.
    """

    attention_norm: Tensor | None
    qkv: tuple[Operand, Operand, Operand]
    qkv_bias: tuple[Tensor, Tensor, Tensor] | None
    qk_norm: tuple[Tensor, Tensor] | None
    attention_out: Operand
    mlp_norm: Tensor
    gate: Operand
    up: Operand
    down: Operand
    out_norms: tuple[Tensor, Tensor] | None


class FusedWeights:
    """``weights`` bear Hugging Face names. ``compute`` is the dtype of norms and biases."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Operand], compute: torch.dtype) -> None:
        self._config, self._weights, self._compute = config, weights, compute

    @property
    def embedding(self) -> Operand:
        """``[V, H]``."""
        return self._weights["model.embed_tokens.weight"]

    @property
    def head(self) -> Operand:
        """The LM head's weight: the embedding, unless there is another."""
        return self._weights.get("lm_head.weight", self.embedding)

    @property
    def final_norm(self) -> Tensor | None:
        """The norm before the LM head."""
        return None if self._bare else self._norm("model.norm.weight")

    @property
    def beside_norm(self) -> Tensor | None:
        """The norm of embeddings that attention reads beside features; see `HeadForm`."""
        head = self._config.head
        return self._norm("model.layers.0.beside_layernorm.weight") if head and head.beside else None

    @property
    def _bare(self) -> bool:
        """Whether the model is a head without these norms; see `HeadForm`."""
        return self._config.head is not None and self._config.head.bare

    @property
    def _as_they_are(self) -> bool:
        """Whether the first layer's attention reads its inputs without a norm; see `HeadForm`."""
        return self._config.head is not None and (self._config.head.bare or self._config.head.normed)

    def layer(self, index: int) -> LayerWeights:
        """The weights of one layer."""
        of, at = self._weights, f"model.layers.{index}."
        query, key, value = (f"{at}self_attn.{part}_proj" for part in "qkv")
        form = self._config.forms[index]
        return LayerWeights(
            attention_norm=self._norm(at + "input_layernorm.weight") if index or not self._as_they_are else None,
            qkv=(of[f"{query}.weight"], of[f"{key}.weight"], of[f"{value}.weight"]),
            qkv_bias=(self._vector(f"{query}.bias"), self._vector(f"{key}.bias"), self._vector(f"{value}.bias"))
            if form.qkv_bias
            else None,
            qk_norm=(self._norm(at + "self_attn.q_norm.weight"), self._norm(at + "self_attn.k_norm.weight"))
            if form.qk_norm
            else None,
            attention_out=of[at + "self_attn.o_proj.weight"],
            mlp_norm=self._norm(at + "post_attention_layernorm.weight"),
            gate=of[at + "mlp.gate_proj.weight"],
            up=of[at + "mlp.up_proj.weight"],
            down=of[at + "mlp.down_proj.weight"],
            out_norms=(
                self._norm(at + "attention_out_layernorm.weight"),
                self._norm(at + "mlp_out_layernorm.weight"),
            )
            if form.post_norms
            else None,
        )

    def _norm(self, name: str) -> Tensor:
        weight = self._vector(name)
        return weight * math.sqrt(len(weight))

    def _vector(self, name: str) -> Tensor:
        return as_tensor(self._weights[name], self._compute)


def as_tensor(weight: Operand, dtype: torch.dtype) -> Tensor:
    """The numbers that a weight stands for."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, StoredTensor):
        with weight.reading():
            return dense(weight, dtype)
    return weight.dense(dtype)


def chosen_rows(weight: Operand, ids_N: Tensor) -> Operand:
    """The rows of these ids, int64 ``[n]``, as a weight of their own: blocks of a file stay blocks."""
    if isinstance(weight, StoredTensor):
        return weight.chosen(ids_N)
    return weight[ids_N] if isinstance(weight, Tensor) else weight.dense(torch.float32)[ids_N]


def rows_of(weight: Operand, ids_N: Tensor) -> Tensor:
    """The numbers of the rows of these ids, int64 ``[n]``: float32 ``[n, ...]``."""
    if isinstance(weight, Tensor):
        return weight[ids_N].float()
    if isinstance(weight, StoredTensor):
        return as_tensor(weight.chosen(ids_N), torch.float32)
    return weight.dense(torch.float32)[ids_N]


def in_eight_bits(weights: Mapping[str, Operand]) -> dict[str, Operand]:
    """The checkpoint with every matrix that enters products rounded, the embedding as it was.

    Raises ValueError for weights that a file holds in blocks: they are in few bits already.
    """
    found = stored_as(weights)
    if found:
        raise ValueError(f"quantize='int8' can't be honoured: the weights are in {found} already; leave it out")
    embedding = weights["model.embed_tokens.weight"]
    matrices = {name: weight for name, weight in weights.items() if len(weight.shape) == 2 and weight is not embedding}
    rounded = {"lm_head.weight": embedding} | matrices
    numbers = {
        name: weight if isinstance(weight, Tensor) else as_tensor(weight, torch.float32)
        for name, weight in rounded.items()
    }
    return {**weights, **{name: Int8Weight(tensor) for name, tensor in numbers.items()}}


def stored_as(weights: Mapping[str, Operand]) -> str:
    """The formats of weights that are not plain numbers, by how many they hold; empty where all are."""
    counts: Counter[str] = Counter()
    for weight in weights.values():
        if isinstance(weight, Int8Weight):
            counts["int8"] += math.prod(weight.shape)
        elif isinstance(weight, StoredTensor) and weight.format.plain is None:
            counts[weight.format.name] += math.prod(weight.shape)
    return ", ".join(name for name, _ in counts.most_common())
