"""A checkpoint's weights, fused and scaled as every decoder of ours wants them, whoever packs them then."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.dequantize import dense
from parlay.models.shapes import Weight
from parlay.models.stored import StoredTensor

Order = Callable[[Tensor, int], Tensor]
"""Puts the rows of each query and key head, ``[heads * D, ...]`` with D given, into the order that rotation wants."""


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """The checkpoint's own order: dimensions i and i + D/2 turn together."""
    del head_dim
    return weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Columns of ``qkv``, ``gate`` and ``up`` carry sqrt(n) times the weight of the norm before them.

    ``qk_norm`` ``[num_heads + num_kv_heads, D]`` is sqrt(D) times the norms' weights, in the dtype of norms.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    attention_out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Arranged:
    """``weights`` bear Hugging Face names. ``compute`` is the dtype of norms and rotations."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        dtype: torch.dtype,
        device: torch.device,
        *,
        order: Order,
    ) -> None:
        self._config, self._weights, self._dtype, self._device = config, weights, dtype, device
        self._order = order
        self.compute = torch.float64 if dtype == torch.float64 else torch.float32
        self.embedding = self._tensor("model.embed_tokens.weight")

    @property
    def final_norm(self) -> Tensor:
        """sqrt(n) times the weight of the norm before the LM head."""
        return self._norm_weight("model.norm.weight")

    @property
    def head(self) -> Tensor:
        """The LM head's weight."""
        return self.embedding if self._config.tie_embeddings else self._tensor("lm_head.weight")

    def layer(self, index: int) -> LayerWeights:
        """The weights of one layer."""
        at = f"model.layers.{index}."
        qkv = [self._qkv(at, part, "weight") for part in ("q", "k", "v")]
        biases = [self._qkv(at, part, "bias") for part in ("q", "k", "v")] if self._config.qkv_bias else None
        return LayerWeights(
            qkv=self._after_norm(at + "input_layernorm.weight", torch.cat(qkv)),
            qkv_bias=None if biases is None else torch.cat(biases),
            qk_norm=self._qk_norm(at) if self._config.qk_norm else None,
            attention_out=self._tensor(at + "self_attn.o_proj.weight"),
            gate=self._after_norm(at + "post_attention_layernorm.weight", self._tensor(at + "mlp.gate_proj.weight")),
            up=self._after_norm(at + "post_attention_layernorm.weight", self._tensor(at + "mlp.up_proj.weight")),
            down=self._tensor(at + "mlp.down_proj.weight"),
        )

    def _qkv(self, at: str, part: str, kind: str) -> Tensor:
        tensor = self._tensor(f"{at}self_attn.{part}_proj.{kind}")
        return tensor if part == "v" else self._order(tensor, self._config.head_dim)

    def _after_norm(self, norm: str, weight: Tensor) -> Tensor:
        """The weight, with that of the norm before it in its columns."""
        return weight.to(self.compute).mul(self._norm_weight(norm)).to(self._dtype)

    def _norm_weight(self, name: str) -> Tensor:
        weight = self._dense(name, self.compute)
        return weight * math.sqrt(self._config.hidden_size)

    def _qk_norm(self, at: str) -> Tensor:
        config = self._config
        counts = {"q": config.num_heads, "k": config.num_kv_heads}
        parts = [
            self._order(self._tensor(f"{at}self_attn.{part}_norm.weight"), config.head_dim).expand(count, -1)
            for part, count in counts.items()
        ]
        return torch.cat(parts).to(self.compute) * math.sqrt(config.head_dim)

    def _tensor(self, name: str) -> Tensor:
        return self._dense(name, self._dtype)

    def _dense(self, name: str, dtype: torch.dtype) -> Tensor:
        weight = self._weights[name]
        if isinstance(weight, StoredTensor):
            with weight.reading():
                return dense(weight, dtype).to(self._device)
        return weight.to(self._device, dtype)
