"""Rotary position embedding (Su et al. 2021) as one complex product per row.

Dimensions i and i + D/2 of a head turn together. `interleave` puts such a pair side by side once, in the projection
weights, so that a head's D numbers read as D/2 complex ones and turning them is a multiplication.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parlay.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the P = D/2 pairs, ``[P]`` float32 on the CPU, stretched as the config says.

    On the CPU even while shapes alone are asked for: on torch's meta device the division loads torch's compiler.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    if rope.kind == "divided":
        return plain / torch.tensor(rope.divisors, device="cpu")
    return plain


def _llama3(rope: RopeConfig, plain_P: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between are mixed."""
    wavelengths = 2 * math.pi / plain_P
    spread = rope.high_freq_factor - rope.low_freq_factor
    kept = ((rope.original_max_context / wavelengths - rope.low_freq_factor) / spread).clamp(0, 1)
    return (1 - kept) * plain_P / rope.factor + kept * plain_P


def _yarn(rope: RopeConfig, plain_P: Tensor, head_dim: int) -> Tensor:
    """Pairs that turn more than ``beta_fast`` times in the original context are kept, slow ones divided by factor."""

    def pair_turning(rotations: float) -> float:
        length = rope.original_max_context / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)
    divided = ramp.clamp(0, 1)
    return divided * plain_P / rope.factor + (1 - divided) * plain_P


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorders each head's rows of ``weight`` ``[heads * D, ...]`` from halves to pairs: 0, D/2, 1, D/2 + 1, ..."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


class Rope:
    """Rotations by position, grown on demand.

    ``queries`` ``[positions, 1, 1, D/2]`` carry the softmax scale; ``keys_values`` ``[positions, 2, 1, D/2]`` turn
    keys and multiply values by one, so that both are stored by the same product.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._attention_factor = rope.attention_factor
        self._dtype = dtype
        self._softmax_scale = head_dim**-0.5
        self.reach(256)

    def reach(self, length: int) -> None:
        """Make positions 0 to ``length - 1`` available."""
        positions = torch.arange(length, device=self._frequencies.device).float()
        angles = torch.outer(positions, self._frequencies).to(self._dtype)
        turns = torch.polar(torch.full_like(angles, self._attention_factor), angles)
        self.queries = (turns * self._softmax_scale)[:, None, None]
        self.keys_values = torch.stack((turns, torch.ones_like(turns)), 1)[:, :, None]

    def at(self, positions: range | list[int]) -> tuple[Tensor, Tensor]:
        """Rotations of these positions for queries, and for keys and values."""
        last = max(positions)
        if last >= len(self.queries):
            self.reach(max(last + 1, 2 * len(self.queries)))
        if isinstance(positions, range):
            return self.queries[positions.start : last + 1], self.keys_values[positions.start : last + 1]
        index = torch.tensor(positions, device=self._frequencies.device)
        return self.queries[index], self.keys_values[index]
