"""Rotary position embedding (Su et al. 2021) as one complex product per row.

Numbers i and i + D/2 of a head rotate together. `interleave` puts each such pair side by side in the projection
weights, so that a head's D numbers can be read as D/2 complex ones, and rotating them is a multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parlay.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the P = D/2 pairs, ``[P]`` float32 on the CPU, scaled as the config says.

    Pairs that do not rotate come last, with 0. It runs on the CPU even for meta tensors: on torch's meta device the
    division would import torch's compiler.
    """
    turning = _turning(rope, rope.rotated or head_dim)
    return torch.nn.functional.pad(turning, (0, head_dim // 2 - len(turning)))


def _turning(rope: RopeConfig, rotated: int) -> Tensor:
    """Radians per position of the pairs that rotate, of ``rotated`` numbers."""
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64, device="cpu").float() / rotated
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, rotated)
    if rope.kind == "divided":
        return plain / torch.tensor(rope.divisors, device="cpu")
    return plain


def _llama3(rope: RopeConfig, plain_P: Tensor) -> Tensor:
    """Frequencies of long wavelengths are divided by the factor, short ones kept, and those between mixed."""
    wavelengths = 2 * math.pi / plain_P
    spread = rope.high_freq_factor - rope.low_freq_factor
    kept = ((rope.original_max_context / wavelengths - rope.low_freq_factor) / spread).clamp(0, 1)
    return (1 - kept) * plain_P / rope.factor + kept * plain_P


def _yarn(rope: RopeConfig, plain_P: Tensor, rotated: int) -> Tensor:
    """Pairs that rotate more than ``beta_fast`` times in the original context are kept, slow ones divided by the
    factor."""

    def pair_turning(rotations: float) -> float:
        length = rope.original_max_context / (rotations * 2 * math.pi)
        return rotated * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (torch.arange(rotated // 2).float() - low) / max(high - low, 0.001)
    divided = ramp.clamp(0, 1)
    return divided * plain_P / rope.factor + (1 - divided) * plain_P


def turn_keys(keys_NLKD: Tensor, ropes: Sequence[RopeConfig | None], positions: int, *, halves: bool) -> None:
    """Rotate keys in place as if their tokens were ``positions`` places later.

    ``ropes`` are those of the layers. With ``halves`` a pair is number i of both halves of a head, otherwise two
    neighbours.
    """
    size = keys_NLKD.shape[-1]
    for layer, rope in enumerate(ropes):
        if rope is None:
            continue
        angles_P = positions * inverse_frequencies(rope, size).double()
        cosines_P, sines_P = angles_P.cos().float(), angles_P.sin().float()
        rows_NKD = keys_NLKD[:, layer]
        pairs = rows_NKD.view(*rows_NKD.shape[:-1], *((2, size // 2) if halves else (size // 2, 2)))
        first_NKP, second_NKP = pairs.float().unbind(-2 if halves else -1)
        turned = first_NKP * cosines_P - second_NKP * sines_P, second_NKP * cosines_P + first_NKP * sines_P
        pairs.copy_(torch.stack(turned, -2 if halves else -1))


def row_order(rope: RopeConfig | None, head_dim: int) -> Tensor | None:
    """An order of a head's D numbers in which number i rotates with i + D/2; None if they are in that order.

    If only some numbers rotate, i and i + rotated/2 are pairs; the others fill up the halves.
    """
    if rope is None or rope.rotated in (0, head_dim):
        return None
    half, rest = rope.rotated // 2, (head_dim - rope.rotated) // 2
    places = torch.arange(head_dim)
    first, second, others = places[:half], places[half : 2 * half], places[2 * half :]
    return torch.cat((first, others[:rest], second, others[rest:]))


def _factors(rope: RopeConfig | None, head_dim: int) -> Tensor:
    """Factors of each pair's cosines and sines, ``[P]``; 1 for pairs that do not rotate."""
    factors = torch.ones(head_dim // 2)
    if rope is not None:
        factors[: (rope.rotated or head_dim) // 2] = rope.attention_factor
    return factors


def interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows of ``weight`` ``[heads * D, ...]`` from halves to pairs: 0, D/2, 1, D/2 + 1, ..."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def cosines_and_sines(rope: RopeConfig | None, head_dim: int, positions: int) -> Tensor:
    """Cosines and sines of positions 0 to ``positions`` - 1, float32 ``[positions, 2, D/2]``.

    Without ``rope`` nothing rotates.
    """
    if rope is None:
        return torch.tensor((1.0, 0.0))[:, None].repeat(positions, 1, head_dim // 2)
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(rope, head_dim))
    return torch.stack((angles.cos(), angles.sin()), 1) * _factors(rope, head_dim)


class Rope:
    """Rotations by position, extended on demand.

    ``queries`` ``[positions, 1, 1, D/2]`` include the softmax scale; ``keys_values`` ``[positions, 2, 1, D/2]`` rotate
    keys and multiply values by one, so that one product stores both. Without ``rope`` nothing rotates.
    """

    def __init__(
        self,
        rope: RopeConfig | None,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float | None = None,
    ) -> None:
        frequencies = torch.zeros(head_dim // 2) if rope is None else inverse_frequencies(rope, head_dim)
        self._frequencies = frequencies.to(device)
        self._factors = _factors(rope, head_dim).to(device, dtype)
        self._dtype = dtype
        self._softmax_scale = head_dim**-0.5 if scale is None else scale
        self.reach(256)

    def reach(self, length: int) -> None:
        """Make positions 0 to ``length - 1`` available."""
        positions = torch.arange(length, device=self._frequencies.device).float()
        angles = torch.outer(positions, self._frequencies).to(self._dtype)
        rotations = torch.polar(self._factors.expand_as(angles), angles)
        self.queries = (rotations * self._softmax_scale)[:, None, None]
        self.keys_values = torch.stack((rotations, torch.ones_like(rotations)), 1)[:, :, None]

    def at(self, positions_N: Tensor, last: int) -> Rotations:
        """Rotations at these positions, int64 on the device; ``last`` is the largest."""
        self._grow(last)
        return Rotations(self.queries[positions_N], self.keys_values[positions_N])

    def room(self, rows: int) -> Rotations:
        """Allocate rotations for ``rows`` rows."""
        return Rotations(*(each.new_zeros(rows, *each.shape[1:]) for each in (self.queries, self.keys_values)))

    def fill(self, room: Rotations, positions_N: Tensor, last: int) -> None:
        """Write the result of `at` to the first rows of ``room``."""
        self._grow(last)
        for factors, own in zip((self.queries, self.keys_values), room, strict=True):
            torch.index_select(factors, 0, positions_N, out=own[: len(positions_N)])

    def _grow(self, last: int) -> None:
        if last >= len(self.queries):
            self.reach(max(last + 1, 2 * len(self.queries)))


class Rotations(NamedTuple):
    """Rotations of a step's rows: ``queries`` ``[T, 1, 1, P]``, and ``keys_values`` ``[T, 2, 1, P]``."""

    queries: Tensor
    keys_values: Tensor
