"""Dequantizes stored blocks exactly as ggml does: scale times code, minus a minimum.

This is the slow, plain way: for devices without kernels for a format, for rows of embeddings, and for tests.
``blocks_NB`` are N blocks of B bytes each, uint8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from parlay.models.weights.formats import INDEXED, Format
from parlay.models.weights.grids import VALUES, points
from parlay.models.weights.stored import StoredTensor

_CHUNK = 1 << 22
"""Weights dequantized at a time, to keep intermediate results small."""
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the codes of IQ4_NL and IQ4_XS."""
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of MXFP4's codes; its scales are halved."""


class Groups(NamedTuple):
    """N blocks as G groups with a scale each: ``scales * codes - minimums``.

    ``codes`` ``[N, G, weights]`` are integers, ``scales`` and ``minimums`` ``[N, G, 1]`` float32; None means no
    minimum.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None


def dense(stored: StoredTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize a tensor, rounded once from float32 to ``dtype``, in memory of its own."""
    plain = stored.format.plain
    if plain is not None:
        return stored.rows.clone().view(plain).view(stored.shape).to(dtype)
    length = stored.shape[-1]
    rows = stored.rows.reshape(-1, stored.data.shape[-1])
    out = torch.empty(len(rows), length, dtype=dtype)
    step = max(1, _CHUNK // length)
    for start in range(0, len(rows), step):
        blocks_NB = rows[start : start + step].reshape(-1, stored.format.block_bytes)
        out[start : start + step] = _numbers(stored.format, blocks_NB).view(-1, length)
    if stored.columns is None:
        return out.view(stored.shape)
    placed = torch.empty_like(out)
    placed[:, stored.columns] = out
    return placed.view(stored.shape)


def groups(format: Format, blocks_NB: Tensor) -> Groups:
    """Split N blocks of B bytes, of any format but F32, F16 and BF16, into codes and scales."""
    return _indexed(format, blocks_NB) if format in INDEXED else _READERS[format](blocks_NB)


def _numbers(format: Format, blocks_NB: Tensor) -> Tensor:
    codes, scales, minimums = groups(format, blocks_NB)
    numbers = scales * codes
    return (numbers if minimums is None else numbers - minimums).flatten(1)


def _half(blocks_NB: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block, ``[N, 1, 1]`` float32."""
    return blocks_NB[:, at : at + 2].contiguous().view(torch.float16).float()[:, :, None]


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack the bytes ``packed`` ``[..., n]`` to codes ``[..., 2 n]``: first all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _looked_up(codes: Tensor, table: tuple[int, ...]) -> Tensor:
    """Replace ``codes``, of any shape, by their int8 values in ``table``."""
    return torch.tensor(table, dtype=torch.int8)[codes.int()]


def _bits(packed: Tensor, width: int) -> Tensor:
    """Unpack the bytes ``packed`` ``[..., n]`` to ``[..., n, 8 / width]`` numbers of ``width`` bits, lowest first."""
    return packed[..., None] >> torch.arange(0, 8, width, dtype=torch.uint8) & (1 << width) - 1


def _q4_0(blocks_NB: Tensor) -> Groups:
    return Groups(_nibbles(blocks_NB[:, None, 2:]).to(torch.int8) - 8, _half(blocks_NB, 0))


def _q4_1(blocks_NB: Tensor) -> Groups:
    return Groups(_nibbles(blocks_NB[:, None, 4:]), _half(blocks_NB, 0), -_half(blocks_NB, 2))


def _q4_z(blocks_NB: Tensor) -> Groups:
    zeros = blocks_NB[:, None, 2:3].view(torch.int8).to(torch.int16)
    codes = _nibbles(blocks_NB[:, 4:].reshape(len(blocks_NB), -1, 16)).flatten(1)
    return Groups(codes[:, None].to(torch.int16) - zeros, _half(blocks_NB, 0))


def _fifth_bits(blocks_NB: Tensor, at: int) -> Tensor:
    """Five-bit codes from four bytes of high bits at ``at`` and the nibbles after them."""
    high = _bits(blocks_NB[:, None, at : at + 4], 1).flatten(2)
    return _nibbles(blocks_NB[:, None, at + 4 :]) | high << 4


def _q5_0(blocks_NB: Tensor) -> Groups:
    return Groups(_fifth_bits(blocks_NB, 2).to(torch.int8) - 16, _half(blocks_NB, 0))


def _q5_1(blocks_NB: Tensor) -> Groups:
    return Groups(_fifth_bits(blocks_NB, 4), _half(blocks_NB, 0), -_half(blocks_NB, 2))


def _q8_0(blocks_NB: Tensor) -> Groups:
    return Groups(blocks_NB[:, None, 2:].contiguous().view(torch.int8), _half(blocks_NB, 0))


def _scales_and_minimums(blocks_NB: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minimums of the eight groups of Q4_K or Q5_K blocks.

    They are six-bit numbers in twelve bytes, times a float16 for each kind.
    """
    scale, minimum, rest = blocks_NB[:, 4:8], blocks_NB[:, 8:12], blocks_NB[:, 12:16]
    scales = torch.cat((scale & 63, rest & 15 | scale >> 2 & 48), 1)
    minimums = torch.cat((minimum & 63, rest >> 4 | minimum >> 2 & 48), 1)
    return _half(blocks_NB, 0) * scales[:, :, None], _half(blocks_NB, 2) * minimums[:, :, None]


def _pairs(packed_NB: Tensor) -> Tensor:
    """Two-bit codes ``[N, 8, 32]``: four neighbouring groups share 32 bytes."""
    return _bits(packed_NB.reshape(-1, 2, 32), 2).transpose(2, 3).reshape(-1, 8, 32)


def _q2_k(blocks_NB: Tensor) -> Groups:
    small = blocks_NB[:, :16, None]
    codes = _pairs(blocks_NB[:, 16:80]).view(-1, 16, 16)
    return Groups(codes, _half(blocks_NB, 80) * (small & 15), _half(blocks_NB, 82) * (small >> 4))


def _q3_k(blocks_NB: Tensor) -> Groups:
    high = _bits(blocks_NB[:, :32], 1).transpose(1, 2)
    codes = (_pairs(blocks_NB[:, 32:96]) | high << 2).to(torch.int8) - 4
    low = _nibbles(blocks_NB[:, 96:104]) | _bits(blocks_NB[:, 104:108], 2).transpose(1, 2).flatten(1) << 4
    return Groups(codes.view(-1, 16, 16), _half(blocks_NB, 108) * (low.to(torch.int8) - 32)[:, :, None])


def _indexed(format: Format, blocks_NB: Tensor) -> Groups:
    found = points(format, blocks_NB)
    scales = found.step.view(torch.float16).float() / VALUES[format][1] * found.small
    return Groups(found.values.view(-1, 16, 16), scales[:, :, None])


def _q4_k(blocks_NB: Tensor) -> Groups:
    codes = _nibbles(blocks_NB[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return Groups(codes, *_scales_and_minimums(blocks_NB))


def _q5_k(blocks_NB: Tensor) -> Groups:
    low = _nibbles(blocks_NB[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    high = _bits(blocks_NB[:, 16:48], 1).transpose(1, 2)
    return Groups(low | high << 4, *_scales_and_minimums(blocks_NB))


def _q6_k(blocks_NB: Tensor) -> Groups:
    low = _nibbles(blocks_NB[:, :128].reshape(-1, 2, 64))
    high = _bits(blocks_NB[:, 128:192].reshape(-1, 2, 32), 2).transpose(2, 3).flatten(2)
    codes = (low | high << 4).to(torch.int8) - 32
    scales = blocks_NB[:, 192:208].contiguous().view(torch.int8)
    return Groups(codes.view(-1, 16, 16), _half(blocks_NB, 208) * scales[:, :, None])


def _iq4_nl(blocks_NB: Tensor) -> Groups:
    return Groups(_looked_up(_nibbles(blocks_NB[:, None, 2:]), NONLINEAR), _half(blocks_NB, 0))


def _iq4_xs(blocks_NB: Tensor) -> Groups:
    high = _bits(blocks_NB[:, 2:4], 2).flatten(1)
    low = _bits(blocks_NB[:, 4:8], 4).flatten(1)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = _nibbles(blocks_NB[:, 8:].reshape(-1, 8, 16))
    return Groups(_looked_up(codes, NONLINEAR), _half(blocks_NB, 0) * scales[:, :, None])


def _mxfp4(blocks_NB: Tensor) -> Groups:
    exponents = blocks_NB[:, None, :1].int() - 128
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return Groups(_looked_up(_nibbles(blocks_NB[:, None, 1:]), _E2M1), scales)


_READERS: dict[Format, Callable[[Tensor], Groups]] = {
    Format.Q4_0: _q4_0,
    Format.Q4_1: _q4_1,
    Format.Q4_Z: _q4_z,
    Format.Q4_Z128: _q4_z,
    Format.Q5_0: _q5_0,
    Format.Q5_1: _q5_1,
    Format.Q8_0: _q8_0,
    Format.Q2_K: _q2_k,
    Format.Q3_K: _q3_k,
    Format.Q4_K: _q4_k,
    Format.Q5_K: _q5_k,
    Format.Q6_K: _q6_k,
    Format.IQ4_NL: _iq4_nl,
    Format.IQ4_XS: _iq4_xs,
    Format.MXFP4: _mxfp4,
}
