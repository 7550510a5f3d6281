"""Counter-based Gumbel noise: what a token's score gets added, as a pure function of key, position and token id.

``argmax(logits + gumbel)`` is a draw from ``softmax(logits)``. Since the noise depends on nothing else, every way of
decoding that looks at the same logits draws the same token.

The bits for a token are the output of that index of the SplitMix64 generator (Steele, Lea, Flood 2014) whose state is
the `stream` of seed, sample index and position. The integers are equal on every device. The two logarithms are within
a last place of float64: about one draw in 1e13 could tell devices apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.sampling import select
from parlay.types import NoiseKey

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

_WHOLE_ROW = 1 << 13  # vocabularies up to here get all their noise; beyond, most of it is proven useless first
_NEAR = 128  # logits whose noise is computed first
_MAX_GUMBEL = 53 * math.log(2) + 1e-9


def mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which each input bit flips half the output bits."""
    value &= _MASK
    value = (value ^ value >> 30) * _MIX1 & _MASK
    value = (value ^ value >> 27) * _MIX2 & _MASK
    return value ^ value >> 31


def stream(key: NoiseKey, position: int, purpose: int = 0) -> int:
    """Which 64-bit generator state serves a position. Purpose 0 is the noise that target and drafters share."""
    state = 0
    for part in (key.seed, key.sample_index, position, purpose):
        state = mix((state ^ part) + _GOLDEN)
    return state


def bits(streams: Tensor | int, ids: Tensor) -> Tensor:
    """SplitMix64 output number ``ids`` of each stream, as int64 (the unsigned value's bit pattern).

    ``streams`` is one stream or a tensor of them from `stream_tensor`, broadcast against ``ids``.
    """
    state = (ids + 1).mul_(_signed(_GOLDEN)) + (_signed(streams) if isinstance(streams, int) else streams)
    scratch = torch.empty_like(state)
    _xor_shifted(state, 30, scratch)
    state.mul_(_signed(_MIX1))
    _xor_shifted(state, 27, scratch)
    state.mul_(_signed(_MIX2))
    return _xor_shifted(state, 31, scratch)


def _xor_shifted(state: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """``state ^= state >>> shift`` in place; torch's own shift would drag the sign along."""
    torch.bitwise_right_shift(state, shift, out=scratch)
    return state.bitwise_xor_(scratch.bitwise_and_((1 << 64 - shift) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def stream_tensor(streams: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([_signed(state) for state in streams], dtype=torch.int64, device=device)


def uniform(noise_bits: Tensor) -> Tensor:
    """Float64 strictly inside (0, 1), rising with the signed bits: the middle of one of 2**52 equal cells."""
    return (noise_bits >> 12).double().add_(2.0**51 + 0.5).mul_(2.0**-52)


def gumbel(noise_bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float64, rising with the signed bits, within (-3.61, 36.74)."""
    return uniform(noise_bits).log_().neg_().log_().neg_()


def draw(logits_RV: Tensor, streams: Sequence[int]) -> list[int]:
    """One token per row: the first maximum of ``float64(logits) + noise``. Rows are float32 with a finite maximum."""
    size = logits_RV.shape[-1]
    if logits_RV.is_cpu and size > _WHOLE_ROW:
        return [_draw_large(row, state) for row, state in zip(logits_RV, streams, strict=True)]
    ids = torch.arange(size, device=logits_RV.device)
    noise_RV = gumbel(bits(stream_tensor(streams, logits_RV.device)[:, None], ids))
    return select.argmax(noise_RV.add_(logits_RV))[1].tolist()


def draw_among(logits_V: Tensor, ids: Tensor, state: int) -> int:
    """One of ``ids``, which rise: the token that `draw` would choose if all others were -inf."""
    return _best(logits_V, ids, bits(state, ids))[1]


def _draw_large(logits_V: Tensor, state: int) -> int:
    """The same token with few logarithms: one below the best logits needs so much noise that its bits show it."""
    maxima = select.block_maxima(logits_V[None])[0]
    bound = maxima.topk(min(_NEAR, maxima.numel() // 2)).values[-1].item()
    near = select.at_least(logits_V, max(bound, torch.finfo(torch.float32).min), maxima)
    score, token = _best(logits_V, near, bits(state, near))
    missing = score - bound - 1e-6 * (1 + abs(score))  # less than the noise that a token below the bound needs
    if missing > _MAX_GUMBEL:
        return token
    all_bits = bits(state, torch.arange(logits_V.numel(), device=logits_V.device))
    far = select.at_least(all_bits, _bits_of(missing))
    if not far.numel():
        return token
    far_score, far_token = _best(logits_V, far, all_bits[far])
    return min((-score, token), (-far_score, far_token))[1]


def _best(logits_V: Tensor, ids: Tensor, id_bits: Tensor) -> tuple[float, int]:
    score, place = gumbel(id_bits).add_(logits_V[ids]).max(0)
    return score.item(), int(ids[place])


def _bits_of(noise: float) -> int:
    """Signed bits below which noise is certainly less than this, roundings of the logarithms included."""
    cell = math.floor(math.exp(-math.exp(min(-noise, 100.0))) * 2.0**52) - 4
    return max(cell - (1 << 51), -(1 << 51)) << 12
