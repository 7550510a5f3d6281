"""The Llama lineage as a function of rows: weights arranged for speed, and the loop over layers.

Rows of all sequences lie in one matrix ``[N, H]``; only attention knows whose they are. Query, key and value weights
form one product, gate and up another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.attention import SERIAL, Attend
from parlay.models.attention_form import Heads
from parlay.models.config import DecoderConfig
from parlay.models.linear import Linear, pack
from parlay.models.rope import interleave


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight)."""

    weight: Tensor
    floor: Tensor

    @staticmethod
    def of(weight: Tensor, eps: float, size: int, compute: torch.dtype) -> RmsNorm:
        floor = torch.tensor((size * eps) ** 0.5, dtype=compute, device=weight.device)
        return RmsNorm(weight.to(compute) * size**0.5, floor)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.weight.dtype)
        scaled = torch.div(x, torch.hypot(length, self.floor)).mul_(self.weight)
        return scaled if scaled.dtype == x.dtype else scaled.to(x.dtype)

    def inplace(self, x: Tensor) -> None:
        length = torch.linalg.vector_norm(x, 2, -1, True)
        x.div_(torch.hypot(length, self.floor)).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: RmsNorm
    qkv: Linear
    qk_norm: RmsNorm | None
    attention_out: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights of a whole model. ``compute`` is the dtype of norms, rotations and exact attention."""

    heads: Heads
    compute: torch.dtype
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: Linear

    def run(
        self, ids: Tensor, attends: Sequence[tuple[int, int, Attend]], taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states after the last layer ``[N, H]``, and those that enter the tapped layers.

        ``attends`` names the rows, from begin to end, of each sequence; rows of none are padding.
        """
        hidden = F.embedding(ids, self.embedding)
        mixed = hidden.new_zeros(len(ids), self.heads.num_heads * self.heads.head_dim)
        outs = [(slice(begin, end), mixed[begin:end], attend) for begin, end, attend in attends]
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped[index] = hidden.clone()
            qkv = self._qkv(layer, hidden)
            for rows, out, attend in outs:
                attend(index, qkv[rows], out)
            hidden.add_(layer.attention_out(mixed))
            gated = silu_product(layer.gate_up(layer.mlp_norm(hidden)))
            hidden.add_(layer.down(gated))
        return hidden, tapped

    def _qkv(self, layer: Layer, hidden: Tensor) -> Tensor:
        """``[N, qkv_heads, D/2]`` complex: query, key and value heads as pairs, normed where the model does so."""
        heads = self.heads
        flat = layer.qkv(layer.attention_norm(hidden))
        if flat.dtype != self.compute:
            flat = flat.to(self.compute)
        if layer.qk_norm is not None:
            rows = flat.view(len(flat), heads.qkv_heads, heads.head_dim)
            layer.qk_norm.inplace(rows[:, : heads.num_heads + heads.num_kv_heads])
        return torch.view_as_complex(flat.view(len(flat), heads.qkv_heads, heads.head_dim // 2, 2))


def silu_product(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for ``[N, 2 I]`` rows that hold gate and up side by side.

    In float32 torch's silu differs in the last bit between vector and remainder lanes, so that no block of rows may
    be large enough to be split between threads within a row.
    """
    gate, up = gate_up.chunk(2, -1)
    if gate.numel() < SERIAL:
        return F.silu(gate).mul_(up)
    blocks = torch.split(gate, max(1, SERIAL // gate.shape[1]))
    return torch.cat([F.silu(block) for block in blocks]).mul_(up)


def build(config: DecoderConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Decoder:
    """Arrange a checkpoint's weights (Hugging Face names) for `Decoder`."""
    return _Builder(config, weights, dtype, device).decoder()


class _Builder:
    """Fuses, reorders and packs."""

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._weights, self._dtype, self._device = config, weights, dtype, device
        self._compute = torch.float64 if dtype == torch.float64 else torch.float32

    def decoder(self) -> Decoder:
        config = self._config
        embedding = self._tensor("model.embed_tokens.weight")
        return Decoder(
            heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
            compute=self._compute,
            embedding=embedding,
            layers=tuple(self._layer(f"model.layers.{index}.") for index in range(config.num_layers)),
            norm=self._norm("model.norm.weight"),
            head=pack(embedding if config.tie_embeddings else self._tensor("lm_head.weight")),
        )

    def _layer(self, at: str) -> Layer:
        bias = self._qkv(at, "bias") if self._config.qkv_bias else None
        return Layer(
            attention_norm=self._norm(at + "input_layernorm.weight"),
            qkv=pack(self._qkv(at, "weight"), bias),
            qk_norm=self._qk_norm(at) if self._config.qk_norm else None,
            attention_out=pack(self._tensor(at + "self_attn.o_proj.weight")),
            mlp_norm=self._norm(at + "post_attention_layernorm.weight"),
            gate_up=pack(torch.cat([self._tensor(f"{at}mlp.{part}_proj.weight") for part in ("gate", "up")])),
            down=pack(self._tensor(at + "mlp.down_proj.weight")),
        )

    def _qkv(self, at: str, kind: str) -> Tensor:
        query, key, value = (self._tensor(f"{at}self_attn.{part}_proj.{kind}") for part in ("q", "k", "v"))
        head_dim = self._config.head_dim
        return torch.cat([interleave(query, head_dim), interleave(key, head_dim), value])

    def _qk_norm(self, at: str) -> RmsNorm:
        """One norm over query and key heads together: weight ``[num_heads + num_kv_heads, D]``."""
        config = self._config
        counts = {"q": config.num_heads, "k": config.num_kv_heads}
        parts = [
            interleave(self._tensor(f"{at}self_attn.{part}_norm.weight"), config.head_dim).expand(count, -1)
            for part, count in counts.items()
        ]
        return RmsNorm.of(torch.cat(parts), config.rms_norm_eps, config.head_dim, self._compute)

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm.of(self._tensor(name), self._config.rms_norm_eps, self._config.hidden_size, self._compute)

    def _tensor(self, name: str) -> Tensor:
        return self._weights[name].to(self._device, self._dtype)
