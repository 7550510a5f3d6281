"""Blocks of IQ1, IQ2 and IQ3: indices of points in tables, signs, and small scales; a point has eight or four
magnitudes.

The tables come from the Python package gguf, as they were found by search and follow no rule. A table has few
magnitudes: three for IQ1 and IQ2, eight for IQ3. With signs these are at most 16 values, so each weight becomes a
four-bit code without a change of value, which is how kernels read these formats (`indexed`).

N blocks of 256 weights, B bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parlay.models.weights.formats import INDEXED, Format
from parlay.models.weights.stored import StoredTensor
from parlay.types import ParlayError

_ONES = ((-9, -7, -1, 1, 7, 9), 8)
_TWOS = ((-43, -25, -8, 8, 25, 43), 8)
_THREES = ((-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62), 4)
_ODD = (tuple(range(-15, 16, 2)), 1)
VALUES: Mapping[Format, tuple[tuple[int, ...], int]] = {
    **dict.fromkeys((Format.IQ1_S, Format.IQ1_M), _ONES),
    **dict.fromkeys((Format.IQ2_XXS, Format.IQ2_XS, Format.IQ2_S), _TWOS),
    Format.IQ3_XXS: _THREES,
    Format.IQ3_S: _ODD,
}
"""The values of the codes, and how many of their units make one unit of scale."""


class Points(NamedTuple):
    """Unpacked blocks: ``values`` int8 ``[N, 256]``, small scales ``[N, 16]``, and float16 bits as int16 ``[N, 1]``."""

    values: Tensor
    small: Tensor
    step: Tensor


def points(format: Format, blocks_NB: Tensor) -> Points:
    """Unpack blocks to integers with scales. Raises ParlayError if the package gguf is not installed."""
    return _READERS[format](blocks_NB)


def indexed(format: Format, rows_RB: Tensor) -> Tensor:
    """Convert rows of blocks to the kernels' form: per block a float16, 16 small scales and 128 bytes of codes."""
    found = points(format, rows_RB.reshape(-1, format.block_bytes))
    places = torch.zeros(256, dtype=torch.uint8)
    values = torch.tensor(VALUES[format][0])
    places[values + 128] = torch.arange(len(values), dtype=torch.uint8)
    low, high = places[found.values.int() + 128].view(-1, 8, 2, 16).unbind(2)
    step, small = found.step.view(torch.uint8), found.small.to(torch.uint8)
    return torch.cat((step, small, (low | high << 4).flatten(1)), 1).view(len(rows_RB), -1)


@cache
def _table(name: str) -> Tensor:
    """The points of a format's table, int8 ``[points, 8 or 4]``."""
    try:
        from gguf import quants
    except ModuleNotFoundError as error:
        raise ParlayError(
            f"{name} blocks are read with tables of the package {error.name}: pip install 'parlay[gguf]'"
        ) from error
    format = getattr(quants, name)
    format.init_grid()
    return torch.from_numpy(np.array(format.grid, dtype=np.int8).reshape(format.grid_shape))


def _words(blocks_NB: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Bytes ``begin`` to ``end`` of the blocks ``[N, B]`` as unsigned integers of ``dtype``, in int32."""
    part = blocks_NB[:, begin:end].clone(memory_format=torch.contiguous_format)  # aligned, even for a single block
    words = part.view(dtype)
    return words.int() & 0xFFFF if dtype is torch.int16 else words


def _bits(packed: Tensor, width: int, count: int) -> Tensor:
    """Unpack numbers, ``packed`` of any shape, to ``[..., count]`` numbers of ``width`` bits, lowest first."""
    return packed[..., None] >> torch.arange(0, width * count, width, dtype=packed.dtype) & (1 << width) - 1


def _signs(bits: Tensor) -> Tensor:
    """Unpack ``bits`` of any shape, eight signs each, to factors ``[..., 8]``."""
    return 1 - 2 * _bits(bits, 1, 8).to(torch.int8)


def _signs_of_seven(bits: Tensor) -> Tensor:
    """Unpack ``bits`` of any shape, seven signs each; an eighth sign makes the number of minus signs even."""
    odd = _bits(bits, 1, 7).sum(-1, dtype=bits.dtype) & 1
    return _signs(bits | odd << 7)


def _nibbles(packed_NB: Tensor) -> Tensor:
    return _bits(packed_NB, 4, 2).flatten(1)


def _step(blocks_NB: Tensor) -> Tensor:
    return blocks_NB[:, :2].contiguous().view(torch.int16)


def _iq2_xxs(blocks_NB: Tensor) -> Points:
    words = _words(blocks_NB, 2, 66, torch.int32).view(-1, 8, 2)
    which = words[:, :, :1].contiguous().view(torch.uint8).int()
    signs = _signs_of_seven(_bits(words[:, :, 1], 7, 4))
    small = words[:, :, 1] >> 28 & 15
    return Points(_signed(_table("IQ2_XXS")[which], signs), _odd(small).repeat_interleave(2, 1), _step(blocks_NB))


def _iq2_xs(blocks_NB: Tensor) -> Points:
    words = _words(blocks_NB, 2, 66, torch.int16)
    values = _signed(_table("IQ2_XS")[words & 511], _signs_of_seven(words >> 9))
    return Points(values, _odd(_nibbles(blocks_NB[:, 66:74])), _step(blocks_NB))


def _iq2_s(blocks_NB: Tensor) -> Points:
    which = blocks_NB[:, 2:34].int() | _bits(blocks_NB[:, 66:74], 2, 4).flatten(1).int() << 8
    values = _signed(_table("IQ2_S")[which], _signs(blocks_NB[:, 34:66]))
    return Points(values, _odd(_nibbles(blocks_NB[:, 74:82])), _step(blocks_NB))


def _iq3_xxs(blocks_NB: Tensor) -> Points:
    words = _words(blocks_NB, 66, 98, torch.int32)
    values = _signed(_table("IQ3_XXS")[blocks_NB[:, 2:66].int()], _signs_of_seven(_bits(words, 7, 4)))
    small = _odd(words >> 28 & 15)
    return Points(values, small.repeat_interleave(2, 1), _step(blocks_NB))


def _iq3_s(blocks_NB: Tensor) -> Points:
    which = blocks_NB[:, 2:66].int() | _bits(blocks_NB[:, 66:74], 1, 8).flatten(1).int() << 8
    values = _signed(_table("IQ3_S")[which], _signs(blocks_NB[:, 74:106]))
    return Points(values, _odd(_nibbles(blocks_NB[:, 106:110])).repeat_interleave(2, 1), _step(blocks_NB))


def _iq1_s(blocks_NB: Tensor) -> Points:
    words = _words(blocks_NB, 34, 50, torch.int16)
    which = blocks_NB[:, 2:34].int() | _bits(words, 3, 4).flatten(1) << 8
    shift = 1 - 2 * (words >> 15)
    values = 8 * _table("IQ1_S")[which].view(-1, 8, 32) + shift[:, :, None].to(torch.int8)
    return Points(values.flatten(1), _odd(words >> 12 & 7).repeat_interleave(2, 1), _step(blocks_NB))


def _iq1_m(blocks_NB: Tensor) -> Points:
    """Unpack IQ1_M; the float16's bits are in the highest four bits of each of the last words."""
    high, words = _nibbles(blocks_NB[:, 32:48]).int(), _words(blocks_NB, 48, 56, torch.int16)
    which = blocks_NB[:, :32].int() | (high & 7) << 8
    shift = 1 - 2 * (high >> 3)
    values = 8 * _table("IQ1_M")[which] + shift[:, :, None].to(torch.int8)
    step = ((words >> 12) << torch.arange(0, 16, 4, dtype=torch.int32)).sum(1, keepdim=True)
    return Points(values.flatten(1), _odd(_bits(words, 3, 4).flatten(1)), step.to(torch.int16))


def _signed(sizes: Tensor, signs: Tensor) -> Tensor:
    """``sizes`` times ``signs``, both of any shape with 256 numbers per block, as ``[N, 256]``."""
    return sizes.reshape(len(sizes), -1) * signs.reshape(len(signs), -1)


def _odd(small: Tensor) -> Tensor:
    """Convert small scales, ``small`` of any shape, to units of one half: 2 s + 1."""
    return (2 * small + 1).to(torch.int8)


_READERS: Mapping[Format, Callable[[Tensor], Points]] = {
    Format.IQ1_S: _iq1_s,
    Format.IQ1_M: _iq1_m,
    Format.IQ2_XXS: _iq2_xxs,
    Format.IQ2_XS: _iq2_xs,
    Format.IQ2_S: _iq2_s,
    Format.IQ3_XXS: _iq3_xxs,
    Format.IQ3_S: _iq3_s,
}


def packable(part: StoredTensor) -> Tensor:
    """The blocks' rows, uint8 ``[O, bytes]``, in the form that the library packs."""
    rows = part.rows
    return indexed(part.format, rows.reshape(-1, rows.shape[-1])) if part.format in INDEXED else rows
