"""The Llama lineage as a function of rows: weights arranged for speed, and the loop over layers.

Rows of all sequences lie in one matrix ``[N, H]``; only attention knows whose they are. Query, key and value weights
form one product, gate and up another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.attention import SERIAL, Attend
from parlay.models.attention_form import Heads
from parlay.models.config import DecoderConfig
from parlay.models.linear import Linear, pack
from parlay.models.rope import interleave
from parlay.types import Skip


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last n numbers, as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight).

    Norms that a linear layer follows have no weight here: the layer's columns carry sqrt(n) weight.
    """

    floor: Tensor
    weight: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Normed rows, in the dtype of ``x``."""
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.floor.dtype).hypot_(self.floor)
        if self.weight is not None:
            return torch.div(x, length).mul_(self.weight).to(x.dtype)
        return torch.div(x, length, out=torch.empty_like(x))

    def inplace(self, x: Tensor) -> None:
        """Norm rows that are in the dtype of the norm already."""
        assert self.weight is not None
        x.div_(torch.linalg.vector_norm(x, 2, -1, True).hypot_(self.floor)).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """``qkv`` and ``gate_up`` carry the weights of the norms before them."""

    qkv: Linear
    qk_norm: RmsNorm | None
    attention_out: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights of a whole model. ``compute`` is the dtype of norms, rotations and exact attention."""

    heads: Heads
    compute: torch.dtype
    embedding: Tensor
    layers: tuple[Layer, ...]
    unit: RmsNorm
    norm: RmsNorm
    head: Linear

    def run(
        self,
        ids: Tensor,
        plan: Callable[[Tensor], Sequence[Attend]],
        taps: Collection[int],
        skip: Skip = frozenset(),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states after the last layer ``[N, H]``, and those that enter the tapped layers.

        ``plan`` gets the matrix ``[N, heads * D]`` that attention writes to, and says how each sequence does. Rows
        pass by the sub-layers of ``skip``.
        """
        hidden = F.embedding(ids, self.embedding)
        mixed = hidden.new_zeros(hidden.shape[0], self.heads.num_heads * self.heads.head_dim)
        attends = plan(mixed)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped[index] = hidden.clone()
            if ("attention", index) not in skip:
                qkv = self._qkv(layer, hidden)
                for attend in attends:
                    attend(index, qkv)
                hidden.add_(layer.attention_out(mixed))
            if ("mlp", index) not in skip:
                hidden.add_(layer.down(silu_product(layer.gate_up(self.unit(hidden)))))
        return hidden, tapped

    def _qkv(self, layer: Layer, hidden: Tensor) -> Tensor:
        """``[N, qkv_heads, D/2]`` complex: query, key and value heads as pairs, normed where the model does so."""
        heads = self.heads
        flat = layer.qkv(self.unit(hidden))
        if flat.dtype != self.compute:
            flat = flat.to(self.compute)
        if layer.qk_norm is not None:
            rows = flat.view(-1, heads.qkv_heads, heads.head_dim)
            layer.qk_norm.inplace(rows.narrow(1, 0, heads.num_heads + heads.num_kv_heads))
        return torch.view_as_complex(flat.view(-1, heads.qkv_heads, heads.head_dim // 2, 2))


def silu_product(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for ``[N, 2 I]`` rows that hold gate and up side by side.

    In float32 torch's silu differs in the last bit between vector and remainder lanes, so that no block of rows may
    be large enough to be split between threads within a row.
    """
    width = gate_up.shape[1] // 2
    gate, up = gate_up.narrow(1, 0, width), gate_up.narrow(1, width, width)
    if gate.numel() < SERIAL:
        return F.silu(gate).mul_(up)
    blocks = torch.split(gate, max(1, SERIAL // width))
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
            unit=RmsNorm(self._floor(config.hidden_size)),
            norm=RmsNorm(self._floor(config.hidden_size), self._norm_weight("model.norm.weight")),
            head=pack(embedding if config.tie_embeddings else self._tensor("lm_head.weight")),
        )

    def _layer(self, at: str) -> Layer:
        query, key, value = (self._qkv(at, part, "weight") for part in ("q", "k", "v"))
        bias = torch.cat([self._qkv(at, part, "bias") for part in ("q", "k", "v")]) if self._config.qkv_bias else None
        gate, up = (self._tensor(f"{at}mlp.{part}_proj.weight") for part in ("gate", "up"))
        return Layer(
            qkv=pack(self._after_norm(at + "input_layernorm.weight", query, key, value), bias),
            qk_norm=self._qk_norm(at) if self._config.qk_norm else None,
            attention_out=pack(self._tensor(at + "self_attn.o_proj.weight")),
            gate_up=pack(self._after_norm(at + "post_attention_layernorm.weight", gate, up)),
            down=pack(self._tensor(at + "mlp.down_proj.weight")),
        )

    def _qkv(self, at: str, part: str, kind: str) -> Tensor:
        tensor = self._tensor(f"{at}self_attn.{part}_proj.{kind}")
        return tensor if part == "v" else interleave(tensor, self._config.head_dim)

    def _after_norm(self, norm: str, *weights: Tensor) -> Tensor:
        """The weights, one below the other, with the weight of the norm before them in their columns."""
        return torch.cat(weights).to(self._compute).mul_(self._norm_weight(norm)).to(self._dtype)

    def _norm_weight(self, name: str) -> Tensor:
        weight = self._weights[name].to(self._device, self._compute)
        return weight * math.sqrt(self._config.hidden_size)

    def _qk_norm(self, at: str) -> RmsNorm:
        """One norm over query and key heads together: weight ``[num_heads + num_kv_heads, D]``."""
        config = self._config
        counts = {"q": config.num_heads, "k": config.num_kv_heads}
        parts = [
            interleave(self._tensor(f"{at}self_attn.{part}_norm.weight"), config.head_dim).expand(count, -1)
            for part, count in counts.items()
        ]
        weight = torch.cat(parts).to(self._compute) * math.sqrt(config.head_dim)
        return RmsNorm(self._floor(config.head_dim), weight)

    def _floor(self, size: int) -> Tensor:
        return torch.tensor((size * self._config.rms_norm_eps) ** 0.5, dtype=self._compute, device=self._device)

    def _tensor(self, name: str) -> Tensor:
        return self._weights[name].to(self._device, self._dtype)
