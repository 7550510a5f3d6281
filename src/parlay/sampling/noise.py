"""Counter-based Gumbel noise: a pure function of key, position and token id, which is added to token scores.

``argmax(logits + gumbel)`` is a draw from ``softmax(logits)``. The noise depends on nothing else, so every way of
decoding that sees the same logits draws the same token.

The SplitMix64 generator (Steele, Lea, Flood 2014) gives the bits. Its state is the `stream` of seed, sample index and
position, and its output number ``t`` belongs to token ``t``. The integers are equal on every device. The two logarithms
may differ by one unit in the last place of float64: devices may disagree in about one draw of 1e13.

Suffixes: S streams, N ids, R rows, C candidates of a row, V the vocabulary.
"""

from __future__ import annotations

import ctypes
import enum
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parlay.compiled import library, structs
from parlay.sampling import select
from parlay.types import NoiseKey

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

_WHOLE_ROW = 1 << 13  # up to this vocabulary size, all noise is computed; above it, only noise that can matter
_RUN = 1 << 15  # how many noise bits are computed at a time
_NEAR = 128  # how many of the largest logits get their noise first
_MAX_GUMBEL = 53 * math.log(2) + 1e-9


class Purpose(enum.IntEnum):
    """The use of a random number. Each purpose has streams of its own, so that no outcome depends on another."""

    SHARED = 0
    """The Gumbel noise of plain decoding, which target and drafters share."""
    DRAFT = 1
    """Tokens that a drafter draws from its own distribution."""
    COIN = 2
    """Whether a rule accepts a drawn token."""
    RESIDUAL = 3
    """The token that a rule draws after a rejection or after the whole draft."""
    ORDER = 4
    """The place of a canvas that is decided next."""
    NOISE = 5
    """The tokens that open places of a canvas read, for models without a mask."""


def mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit integers in which each input bit flips half the output bits."""
    value &= _MASK
    value = (value ^ value >> 30) * _MIX1 & _MASK
    value = (value ^ value >> 27) * _MIX2 & _MASK
    return value ^ value >> 31


def stream(key: NoiseKey, position: int, purpose: int = Purpose.SHARED, *draw: int) -> int:
    """The 64-bit generator state for an absolute position.

    For purposes other than the shared one, ``draw`` adds the step (the length of the text before it) and the number of
    the draw within the step. A rejected position is drafted again in a later step. If that step drew the same numbers
    again, its outcome would depend on the earlier verdict, and the text would have another distribution.
    """
    state = 0
    for part in (key.seed, key.sample_index, position, purpose, *draw):
        state = mix((state ^ part) + _GOLDEN)
    return state


def bits(streams: Sequence[int], ids: Tensor) -> Tensor:
    """Outputs of each stream for ``ids``: ``[S, N]`` int64, the bit patterns of unsigned values.

    ``ids`` is ``[S, N]``, or ``[N]`` for the same ids in all streams.
    """
    first = [state + _GOLDEN & _MASK for state in streams]
    if ids.is_cpu:  # NumPy is many times faster than torch here
        steps = ids.numpy().view(np.uint64) * np.uint64(_GOLDEN)
        return torch.from_numpy(_hash(np.array(first, np.uint64)[:, None] + steps).view(np.int64))
    states = torch.tensor([_signed(state) for state in first], dtype=torch.int64, device=ids.device)
    return _signed_hash(states[:, None] + ids * _signed(_GOLDEN))


def _hash(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`mix` of each element, in place."""
    shifted = np.empty_like(z)
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        z ^= np.right_shift(z, np.uint64(shift), out=shifted)
        z *= np.uint64(factor)
    z ^= np.right_shift(z, np.uint64(31), out=shifted)
    return z


def _signed_hash(z_SN: Tensor) -> Tensor:
    """`mix` of each element, in place, for devices that can only shift signed integers."""
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        z_SN ^= z_SN >> shift & (1 << 64 - shift) - 1  # the mask clears the copies of the sign bit
        z_SN *= _signed(factor)
    z_SN ^= z_SN >> 31 & (1 << 33) - 1
    return z_SN


def _signed(value: int) -> int:
    """The int64 with the bits of this unsigned 64-bit integer."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def uniform(noise_bits: Tensor) -> Tensor:
    """Float64 strictly inside (0, 1), rising with the signed bits: the middle of one of 2**52 equal cells.

    ``noise_bits`` has any shape, and the result has the same.
    """
    return (noise_bits >> 12).double().add_(2.0**51 + 0.5).mul_(2.0**-52)


def uniform_of(state: int) -> float:
    """`uniform` of the stream's first output."""
    return float(((_signed(mix(state + _GOLDEN)) >> 12) + (2.0**51 + 0.5)) * 2.0**-52)


def gumbel(noise_bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float64, rising with the signed bits, within (-3.61, 36.74).

    ``noise_bits`` has any shape, and the result has the same.
    """
    if not noise_bits.is_cpu:
        return uniform(noise_bits).log_().neg_().log_().neg_()
    noise = uniform(noise_bits).numpy()
    for _ in range(2):  # NumPy is faster, as above
        np.negative(np.log(noise, out=noise), out=noise)
    return torch.from_numpy(noise)


def draw(logits_RV: Tensor, streams: Sequence[int]) -> list[int]:
    """One token per row: the first maximum of ``float64(logits) + noise``. Rows are float32 with a finite maximum."""
    size = logits_RV.shape[-1]
    if logits_RV.is_cpu and (size > _WHOLE_ROW or compiled() is not None):
        return [_best_of_row(row, state, 1)[0] for row, state in zip(logits_RV, streams, strict=True)]
    ids = torch.arange(size, device=logits_RV.device)
    return select.argmax(gumbel(bits(streams, ids)).add_(logits_RV))[1].tolist()


def best(logits_RV: Tensor, streams: Sequence[int], count: int) -> list[list[int]]:
    """For each row, the ``count`` tokens with the largest ``float64(logits) + noise``, largest first, without -inf.

    The first is the one that `draw` returns. Rows are as for `draw`.
    """
    size = logits_RV.shape[-1]
    if logits_RV.is_cpu and (size > _WHOLE_ROW or compiled() is not None):
        return [_best_of_row(row, state, count) for row, state in zip(logits_RV, streams, strict=True)]
    return _best_of_rows(logits_RV, streams, count)


def _best_of_rows(logits_RV: Tensor, streams: Sequence[int], count: int) -> list[list[int]]:
    """`best`, computed from the noise of all tokens."""
    ids = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    scores_RV = gumbel(bits(streams, ids)).add_(logits_RV)
    return [select.leading_finite(scores_V, count) for scores_V in scores_RV]


def draw_among(logits_V: Tensor, ids_N: Tensor, state: int) -> int:
    """One of the rising ``ids_N``: the token that `draw` would return if all other logits were -inf."""
    return _best(logits_V, ids_N, bits([state], ids_N)[0])[1]


def draw_among_rows(logits_RV: Tensor, ids_RC: Tensor, stay_RC: Tensor, streams: Sequence[int]) -> list[int]:
    """`draw_among` for several rows, each among those of its rising ids that ``stay_RC`` marks."""
    scores_RC = gumbel(bits(streams, ids_RC)).add_(logits_RV.gather(1, ids_RC))
    places_R = select.argmax(scores_RC.masked_fill_(~stay_RC, -torch.inf))[1]
    return ids_RC.gather(1, places_R[:, None])[:, 0].tolist()


def _best_of_row(logits_V: Tensor, state: int, count: int) -> list[int]:
    """`best` for one row, by the compiled library unless scores are too close for its logarithms."""
    core = compiled()
    plain = logits_V.dtype == torch.float32 and logits_V.is_contiguous()
    if core is not None and count <= structs.MOST_BEST and plain:
        ids = (ctypes.c_int64 * structs.best_room(count))()
        found = core.noisy_best(logits_V.data_ptr(), logits_V.numel(), 1.0, state, count, ids)
        if found > 0:
            return ids[:found]
    if logits_V.numel() > _WHOLE_ROW:
        return _best_by_bound(logits_V, state, count)
    return _best_of_rows(logits_V[None], [state], count)[0]


@cache
def compiled() -> structs.Core | None:
    """The compiled library, or None if it is not available. Its switch is read once; see `triton_here.interpreted`."""
    try:
        return library.load()
    except library.NotLoaded:
        return None


def _best_by_bound(logits_V: Tensor, state: int, count: int) -> list[int]:
    """`best` for one row, with few logarithms.

    A token below the best logits can only win with large noise, and the bits alone tell whether its noise is large.
    """
    maxima_B = select.block_maxima(logits_V[None])[0]
    bound = max(
        maxima_B.topk(min(max(_NEAR, count), maxima_B.numel() // 2)).values[-1].item(), torch.finfo(torch.float32).min
    )
    near_N = select.at_least(logits_V, bound, maxima_B)
    scores_N = gumbel(bits([state], near_N)[0]).add_(logits_V[near_N])
    enough = near_N.numel() >= count
    lowest = scores_N.topk(count).values[-1].item() if enough else -math.inf
    missing = lowest - bound - 1e-6 * (1 + abs(lowest))
    if missing <= _MAX_GUMBEL:
        far_N = _noisy(state, logits_V.numel(), _bits_of(missing))[0]
        near_N = torch.from_numpy(np.union1d(near_N.numpy(), far_N.numpy()))
        scores_N = gumbel(bits([state], near_N)[0]).add_(logits_V[near_N])
    return near_N[select.leading_finite(scores_N, count)].tolist()


def _noisy(state: int, size: int, floor: int) -> tuple[Tensor, Tensor]:
    """Return the ids whose bits reach ``floor``, rising, and their bits, ``[N]`` each.

    Ids are hashed in runs that fit into the CPU's cache.
    """
    ids, found = [], []
    run = torch.arange(min(_RUN, size))
    for start in range(0, size, _RUN):
        run_bits = bits([state + start * _GOLDEN], run[: size - start])[0].numpy()
        places = np.flatnonzero(run_bits >= floor)
        ids.append(places + start)
        found.append(run_bits[places])
    return torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(found))


def _best(logits_V: Tensor, ids_N: Tensor, bits_N: Tensor) -> tuple[float, int]:
    """The highest score among ``ids_N``, noise included, and its id."""
    score, place = gumbel(bits_N).add_(logits_V[ids_N]).max(0)
    return score.item(), int(ids_N[place])


def _bits_of(noise: float) -> int:
    """A threshold: noise with lower signed bits is certainly less than ``noise``, however logarithms are rounded."""
    cell = math.floor(math.exp(-math.exp(min(-noise, 100.0))) * 2.0**52) - 4
    return max(cell - (1 << 51), -(1 << 51)) << 12
