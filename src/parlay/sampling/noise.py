"""Counter-based Gumbel noise: what a token's score gets added, as a pure function of key, position and token id.

``argmax(logits + gumbel)`` is a draw from ``softmax(logits)``. Since the noise depends on nothing else, every way of
decoding that looks at the same logits draws the same token.

The bits for a token are the output of that index of the SplitMix64 generator (Steele, Lea, Flood 2014) whose state is
the `stream` of seed, sample index and position. The integers are equal on every device. The two logarithms are within
a last place of float64: about one draw in 1e13 could tell devices apart.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parlay.sampling import select
from parlay.types import NoiseKey

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

_WHOLE_ROW = 1 << 13  # vocabularies up to here get all their noise; beyond, most of it is proven useless first
_RUN = 1 << 15  # noise bits computed at a time
_NEAR = 128  # logits whose noise is computed first
_MAX_GUMBEL = 53 * math.log(2) + 1e-9


class Purpose(enum.IntEnum):
    """What randomness is for. Each purpose has streams of its own, so that none depends on another's outcome."""

    SHARED = 0
    """The Gumbel noise of plain decoding, which target and drafters share."""
    DRAFT = 1
    """Tokens that a drafter draws from its own law."""
    COIN = 2
    """Whether a rule accepts a drawn token."""
    RESIDUAL = 3
    """The token that a rule draws where none was accepted, and the bonus."""


def mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which each input bit flips half the output bits."""
    value &= _MASK
    value = (value ^ value >> 30) * _MIX1 & _MASK
    value = (value ^ value >> 27) * _MIX2 & _MASK
    return value ^ value >> 31


def stream(key: NoiseKey, position: int, purpose: int = Purpose.SHARED, *draw: int) -> int:
    """Which 64-bit generator state serves an absolute position.

    Purposes other than the shared one add the ``draw``: the step (by the length of the text before it) and the number
    of the draw within it. A position that was drafted in vain is drafted again in a later step, and if what was drawn
    there had any part in an earlier verdict, drawing the same once more would change the law.
    """
    state = 0
    for part in (key.seed, key.sample_index, position, purpose, *draw):
        state = mix((state ^ part) + _GOLDEN)
    return state


def bits(streams: Sequence[int], ids: Tensor) -> Tensor:
    """SplitMix64 output number ``ids[n]`` of each stream, ``[S, N]`` int64: the unsigned value's bit pattern.

    Ids ``[S, N]`` are those of each stream.
    """
    first = [state + _GOLDEN & _MASK for state in streams]
    if ids.is_cpu:  # NumPy's arithmetic takes a fraction of the time that torch's does there
        steps = ids.numpy().view(np.uint64) * np.uint64(_GOLDEN)
        return torch.from_numpy(_hash(np.array(first, np.uint64)[:, None] + steps).view(np.int64))
    states = torch.tensor([_signed(state) for state in first], dtype=torch.int64, device=ids.device)
    return _signed_hash(states[:, None] + ids * _signed(_GOLDEN))


def _hash(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`mix` of each element, in its place."""
    shifted = np.empty_like(z)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        z ^= np.right_shift(z, np.uint64(shift), out=shifted)
        z *= np.uint64(factor)
    z ^= np.right_shift(z, np.uint64(31), out=shifted)
    return z


def _signed_hash(z: Tensor) -> Tensor:
    """`mix` of each element, in its place, for devices that shift signed integers only."""
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        z ^= z >> shift & (1 << 64 - shift) - 1  # the mask drops what an arithmetic shift drags in
        z *= _signed(factor)
    z ^= z >> 31 & (1 << 33) - 1
    return z


def _signed(value: int) -> int:
    """The int64 with the bits of this unsigned 64-bit integer."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def uniform(noise_bits: Tensor) -> Tensor:
    """Float64 strictly inside (0, 1), rising with the signed bits: the middle of one of 2**52 equal cells."""
    return (noise_bits >> 12).double().add_(2.0**51 + 0.5).mul_(2.0**-52)


def uniform_of(state: int) -> float:
    """`uniform` of the stream's first output."""
    return float(((_signed(mix(state + _GOLDEN)) >> 12) + (2.0**51 + 0.5)) * 2.0**-52)


def gumbel(noise_bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float64, rising with the signed bits, within (-3.61, 36.74)."""
    if not noise_bits.is_cpu:
        return uniform(noise_bits).log_().neg_().log_().neg_()
    noise = uniform(noise_bits).numpy()
    for _ in range(2):  # NumPy's logarithm, as above
        np.negative(np.log(noise, out=noise), out=noise)
    return torch.from_numpy(noise)


def draw(logits_RV: Tensor, streams: Sequence[int]) -> list[int]:
    """One token per row: the first maximum of ``float64(logits) + noise``. Rows are float32 with a finite maximum."""
    size = logits_RV.shape[-1]
    if logits_RV.is_cpu and size > _WHOLE_ROW:
        return [_draw_large(row, state) for row, state in zip(logits_RV, streams, strict=True)]
    ids = torch.arange(size, device=logits_RV.device)
    return select.argmax(gumbel(bits(streams, ids)).add_(logits_RV))[1].tolist()


def draw_among(logits_V: Tensor, ids: Tensor, state: int) -> int:
    """One of ``ids``, which rise: the token that `draw` would choose if all others were -inf."""
    return _best(logits_V, ids, bits([state], ids)[0])[1]


def draw_among_rows(logits_RV: Tensor, ids_RC: Tensor, stay_RC: Tensor, streams: Sequence[int]) -> list[int]:
    """`draw_among` for several rows: one of each row's ids, which rise, that stays."""
    scores_RC = gumbel(bits(streams, ids_RC)).add_(logits_RV.gather(1, ids_RC))
    places_R = select.argmax(scores_RC.masked_fill_(~stay_RC, -torch.inf))[1]
    return ids_RC.gather(1, places_R[:, None])[:, 0].tolist()


def _draw_large(logits_V: Tensor, state: int) -> int:
    """The same token with few logarithms: one below the best logits needs so much noise that its bits show it."""
    maxima = select.block_maxima(logits_V[None])[0]
    bound = maxima.topk(min(_NEAR, maxima.numel() // 2)).values[-1].item()
    near = select.at_least(logits_V, max(bound, torch.finfo(torch.float32).min), maxima)
    score, token = _best(logits_V, near, bits([state], near)[0])
    missing = score - bound - 1e-6 * (1 + abs(score))  # less than the noise that a token below the bound needs
    if missing > _MAX_GUMBEL:
        return token
    far, far_bits = _noisy(state, logits_V.numel(), _bits_of(missing))
    if not far.numel():
        return token
    far_score, far_token = _best(logits_V, far, far_bits)
    return min((-score, token), (-far_score, far_token))[1]


def _noisy(state: int, size: int, floor: int) -> tuple[Tensor, Tensor]:
    """Ids whose bits reach ``floor``, rising, and their bits. Hashed in runs that fit the processor's cache."""
    ids, found = [], []
    run = torch.arange(min(_RUN, size))
    for start in range(0, size, _RUN):
        run_bits = bits([state + start * _GOLDEN], run[: size - start])[0].numpy()
        places = np.flatnonzero(run_bits >= floor)
        ids.append(places + start)
        found.append(run_bits[places])
    return torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(found))


def _best(logits_V: Tensor, ids: Tensor, id_bits: Tensor) -> tuple[float, int]:
    score, place = gumbel(id_bits).add_(logits_V[ids]).max(0)
    return score.item(), int(ids[place])


def _bits_of(noise: float) -> int:
    """Signed bits below which noise is certainly less than this, roundings of the logarithms included."""
    cell = math.floor(math.exp(-math.exp(min(-noise, 100.0))) * 2.0**52) - 4
    return max(cell - (1 << 51), -(1 << 51)) << 12
