"""The Llama lineage as a function of rows: weights arranged for speed, and the loop over layers.

Rows of all sequences lie in one matrix ``[N, H]``; only attention knows whose they are. Query, key and value weights
form one product, gate and up another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.arranged import Arranged
from parlay.models.attention import SERIAL, Attend
from parlay.models.attention_form import Heads
from parlay.models.config import DecoderConfig
from parlay.models.linear import Linear, pack
from parlay.models.quantize import rounded
from parlay.models.rope import interleave
from parlay.models.shapes import Weight
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
        hidden: Tensor,
        plan: Callable[[Tensor], Sequence[Attend]],
        taps: Collection[int],
        skip: Skip = frozenset(),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states after the last layer ``[N, H]``, and those that enter the tapped layers.

        ``hidden`` ``[N, H]`` are the rows' inputs, which are overwritten. ``plan`` gets the matrix ``[N, heads * D]``
        that attention writes to, and says how each sequence does. Rows pass by the sub-layers of ``skip``.
        """
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


def build(
    config: DecoderConfig,
    weights: Mapping[str, Weight],
    dtype: torch.dtype,
    device: torch.device,
    *,
    int8: bool = False,
) -> Decoder:
    """Pack a checkpoint's weights (Hugging Face names) for `Decoder`; ``int8``: rounded to eight bits before."""
    arranged = Arranged(config, weights, dtype, device, order=interleave)

    def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
        return pack(rounded(weight) if int8 else weight, bias)

    def floor(size: int) -> Tensor:
        return torch.tensor((size * config.rms_norm_eps) ** 0.5, dtype=arranged.compute, device=device)

    def packed(index: int) -> Layer:
        layer = arranged.layer(index)
        return Layer(
            qkv=linear(layer.qkv, layer.qkv_bias),
            qk_norm=None if layer.qk_norm is None else RmsNorm(floor(config.head_dim), layer.qk_norm),
            attention_out=linear(layer.attention_out),
            gate_up=linear(torch.cat((layer.gate, layer.up))),
            down=linear(layer.down),
        )

    return Decoder(
        heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
        compute=arranged.compute,
        embedding=arranged.embedding,
        layers=tuple(packed(index) for index in range(config.num_layers)),
        unit=RmsNorm(floor(config.hidden_size)),
        norm=RmsNorm(floor(config.hidden_size), arranged.final_norm),
        head=linear(arranged.head),
    )
