"""The parts of heads: norms, rotary attention, MLPs, and decoder layers whose steps attend to earlier steps.

Shapes: B texts, T rows of each, R of them computed, H hidden, A query heads, K key heads, D head size, P pairs of its
numbers that are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parlay.models.config import DecoderConfig
from parlay.models.rope import inverse_frequencies


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` ``[..., size]``."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self._eps).to(x.dtype)


@dataclass(slots=True)
class Steps:
    """The keys and values of all steps of training-time test, one tensor per step, with heads repeated to A.

    Row i of a later step continues row i of the step before. So it attends to the first step's rows up to i, and to row
    i of all later steps (Li et al. 2025, EAGLE-3). ``padding``, int64 ``[B]``, is the number of masked rows at the
    beginning of each text. Only the last ``rows`` rows of T are computed (R); the first step uses keys and values of
    all. ``prefix`` ``[2, K, P, D]``: additional keys and values that all rows of later steps attend to; here P is its
    length.
    """

    padding: Tensor | None = None
    rows: int | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    prefix: Tensor | None = None

    def last(self, x: Tensor) -> Tensor:
        """Return the rows ``[B, R, ...]`` of ``x`` ``[B, T, ...]`` that are computed."""
        return x if self.rows is None else x[:, x.shape[1] - min(self.rows, x.shape[1]) :]

    def hidden(self, rows: int) -> Tensor:
        """Return the first step's rows that computed rows must not attend to, bool.

        The shape is ``[B, 1, R, T]``, or ``[R, T]`` without padding.
        """
        total = self.keys[0].shape[2]
        places = torch.arange(total, device=self.keys[0].device)
        own = places[total - rows :, None]
        if self.padding is None:
            return places > own
        return (places > own) | ((places < self.padding[:, None, None, None]) & (places != own))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; queries, keys and values read ``inputs`` numbers per row."""

    def __init__(self, config: DecoderConfig, inputs: int) -> None:
        super().__init__()
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, key, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, key, bias=config.qkv_bias)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self._dim, self._group = config.head_dim, config.num_heads // config.num_kv_heads
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        turning = (config.rope.rotated or config.head_dim) // 2
        self.register_buffer("_frequencies_P", frequencies[:turning], persistent=False)
        self._factor = config.rope.attention_factor

    def forward(self, x: Tensor, steps: Steps) -> Tensor:
        """Run the next step's rows ``x`` ``[B, T, inputs]``; their keys and values are added to ``steps``.

        Returns ``[B, R, H]``.
        """
        wanted, end = steps.last(x), len(steps.keys) + (steps.keys[0].shape[2] if steps.keys else x.shape[1])
        query = self._turn(self._heads(self.q_proj(wanted), self.q_norm), end)
        key = self._turn(self._heads(self.k_proj(x), self.k_norm), end)
        steps.keys.append(key.repeat_interleave(self._group, 1))
        steps.values.append(self._heads(self.v_proj(x)).repeat_interleave(self._group, 1))
        mixed = _attend(query, steps)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor, norm: RmsNorm | None = None) -> Tensor:
        """Reshape ``x`` ``[B, T, heads * D]`` to ``[B, heads, T, D]``, and normalize each head if there is a norm."""
        split = x.view(*x.shape[:2], -1, self._dim)
        return (split if norm is None else norm(split)).transpose(1, 2)

    def _turn(self, x: Tensor, end: int) -> Tensor:
        """Rotate ``x`` ``[B, heads, T, D]`` by position; the last row's position is ``end`` - 1.

        Only the first 2 P numbers of each head are rotated: in some models, P is less than D / 2.
        """
        assert isinstance(self._frequencies_P, Tensor)
        positions_T = torch.arange(end - x.shape[2], end, device=x.device)
        angles_TP = torch.outer(positions_T.float(), self._frequencies_P)
        cosine, sine = ((self._factor * part).to(x.dtype) for part in (angles_TP.cos(), angles_TP.sin()))
        turning = 2 * cosine.shape[-1]
        first, second = x[..., :turning].chunk(2, -1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine, x[..., turning:]), -1)


def _attend(query_BARD: Tensor, steps: Steps) -> Tensor:
    """Return the attention ``[B, A, R, D]`` of the latest step's rows; see `Steps`."""
    rows, total = query_BARD.shape[2], steps.keys[0].shape[2]
    hidden = steps.hidden(rows)
    if len(steps.keys) == 1:
        return F.scaled_dot_product_attention(query_BARD, steps.keys[0], steps.values[0], attn_mask=~hidden)
    scale = query_BARD.shape[-1] ** -0.5
    past = (query_BARD @ steps.keys[0].transpose(2, 3)).float() * scale
    later = [(query_BARD * key).float().sum(-1, keepdim=True) * scale for key in steps.keys[1:]]
    scores = [past.masked_fill(hidden, -torch.inf), *later]
    before = (
        None
        if steps.prefix is None
        else steps.prefix.to(query_BARD.dtype).repeat_interleave(query_BARD.shape[1] // steps.prefix.shape[1], 1)
    )
    if before is not None:
        scores.append((query_BARD @ before[0].mT).float() * scale)
    weights = torch.cat(scores, -1).softmax(-1).to(query_BARD.dtype)
    mixed = weights[..., :total] @ steps.values[0]
    for place, value in enumerate(steps.values[1:]):
        mixed = mixed + weights[..., total + place, None] * value
    return mixed if before is None else mixed + weights[..., -before.shape[2] :] @ before[1]


class Mlp(nn.Module):
    """silu(gate(x)) * up(x), projected back to H."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` ``[..., H]`` to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A decoder layer of the Llama architecture."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(size, eps)
        self.self_attn = Attention(config, size)
        self.post_attention_layernorm = RmsNorm(size, eps)
        self.mlp = Mlp(config)

    def forward(self, x_BTH: Tensor, steps: Steps) -> Tensor:
        """Run the layer; returns ``[B, R, H]``."""
        hidden_BRH = steps.last(x_BTH) + self.self_attn(self.input_layernorm(x_BTH), steps)
        out: Tensor = hidden_BRH + self.mlp(self.post_attention_layernorm(hidden_BRH))
        return out


def add_nothing(layer: nn.Module) -> None:
    """Set a decoder layer's weights so that it returns its input."""
    with torch.no_grad():
        layer.get_parameter("self_attn.o_proj.weight").zero_()
        layer.get_parameter("mlp.down_proj.weight").zero_()
