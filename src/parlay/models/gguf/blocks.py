"""Quantizes numbers to GGUF's block formats; `parlay.models.weights.dequantize` reads them.

Without ``importance`` the formats with blocks of 32 give the same bits as the package gguf. All others search for the
scales with the least weighted error (`rounding`). N blocks of K weights ``x_NK``, float32, become B bytes each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from parlay.models.gguf import rounding
from parlay.models.weights.dequantize import NONLINEAR
from parlay.models.weights.formats import Format
from parlay.models.weights.fused import Operand, as_tensor, multiplied
from parlay.models.weights.quantize import Int8Weight
from parlay.models.weights.stored import StoredTensor
from parlay.system import threads

_CHUNK = 1 << 18
"""Weights quantized at a time, so that intermediate results stay in the processor's cache."""
_WORTH = 0.85
"""Weights are quantized on load if they then take at most this share of their bits."""
_Writer = Callable[[Tensor, Tensor | None], Tensor]
ROUNDED = {4: Format.Q4_0, 8: Format.Q8_0}
"""The format of weights that are quantized on load to this many bits."""


def encoded(format: Format, rows_RI: Tensor, importance_I: Tensor | None = None) -> Tensor:
    """Quantize rows to blocks, uint8 ``[R, bytes]``. Raises ValueError unless they consist of whole blocks.

    ``importance_I`` weights the error of each column; it is the mean square of the column's inputs.
    """
    if format.plain is not None:
        return rows_RI.to(format.plain).contiguous().view(torch.uint8).view(len(rows_RI), -1)
    rows, row_bytes = rows_RI.float(), format.row_bytes(rows_RI.shape[1])
    out_RB = torch.empty(len(rows), row_bytes, dtype=torch.uint8)
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        weights = None if importance_I is None else importance_I.expand_as(part).reshape(-1, format.block)
        out_RB[start : start + step] = WRITERS[format](part.reshape(-1, format.block), weights).view(-1, row_bytes)
    return out_RB


def rounded(weights: Mapping[str, Operand], bits: int) -> dict[str, Operand]:
    """Quantize a checkpoint's matrices to blocks of ``bits`` bits (`ROUNDED`) if they have more.

    Matrices whose rows are not whole blocks stay as they are. Raises ValueError if that saves hardly any bits.
    """
    found, format = multiplied(weights), ROUNDED[bits]
    wide = {
        name: weight
        for name, weight in found.items()
        if weight.shape[-1] % format.block == 0 and _bits(weight) > format.bits
    }
    sizes = [(math.prod(weight.shape), _bits(weight), name in wide) for name, weight in found.items()]
    whole = sum(size for size, _, _ in sizes)
    before = sum(size * own for size, own, _ in sizes) / whole
    after = sum(size * (format.bits if is_wide else own) for size, own, is_wide in sizes) / whole
    if after > _WORTH * before:
        raise ValueError(f"weights of {before:.1f} bits would have {after:.1f}, which is hardly less")

    def blocks(weight: Operand) -> StoredTensor:
        numbers = weight.dense(torch.float32) if isinstance(weight, Int8Weight) else as_tensor(weight, torch.float32)
        return StoredTensor(format, tuple(weight.shape), encoded(format, numbers))

    with ThreadPoolExecutor(threads.count(), initializer=partial(torch.set_num_threads, 1)) as pool:
        made = pool.map(blocks, wide.values())
        return {**weights, "lm_head.weight": found["lm_head.weight"], **dict(zip(wide, made, strict=True))}


def _bits(weight: Operand) -> float:
    """Bits per number of a matrix, scales included."""
    if isinstance(weight, StoredTensor):
        return weight.format.bits
    return 8.0 if isinstance(weight, Int8Weight) else 8.0 * weight.element_size()


def _usual(x_NK: Tensor) -> Tensor:
    """The weights ``[N, K]`` of squared errors when nothing is known of the inputs."""
    return x_NK.abs() + x_NK.square().mean(1, keepdim=True).sqrt()


def _half(x_N1: Tensor) -> tuple[Tensor, Tensor]:
    """A float16 as bytes ``[N, 2]``, and its value in float32, ``[N, 1]``."""
    half_N1 = x_N1.to(torch.float16)
    return half_N1.view(torch.uint8), half_N1.float()


def _inverse(x: Tensor) -> Tensor:
    """1 / ``x`` of any shape, with 0 where ``x`` is 0."""
    return torch.where(x == 0, torch.zeros_like(x), 1 / x)


def _nibbles(codes: Tensor) -> Tensor:
    """Pack four-bit ``codes`` ``[..., 2 n]`` into bytes ``[..., n]``; the first half goes to the low nibbles."""
    low, high = codes.chunk(2, -1)
    return low & 15 | high << 4


def _gathered(codes: Tensor, width: int) -> Tensor:
    """Pack ``codes`` ``[..., 8 / width, n]`` of ``width`` bits into bytes ``[..., n]``, the first code lowest."""
    places = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (codes << places).sum(-2, dtype=torch.uint8)


def _with_fifth_bits(codes_NK: Tensor) -> Tensor:
    """Pack five-bit codes ``[N, 32]``: four bytes of high bits, then nibbles."""
    high = _gathered((codes_NK >> 4).view(-1, 4, 8, 1), 1).flatten(1)
    return torch.cat((high, _nibbles(codes_NK)), 1)


def _centred(x_NK: Tensor, w_NK: Tensor | None, half: int) -> tuple[Tensor, Tensor]:
    """Quantize 32 weights to one scale and codes centred at ``half``: Q4_0 and Q5_0."""
    if w_NK is None:
        scale_N1 = x_NK.gather(1, x_NK.abs().argmax(1, keepdim=True)) / -half
        codes_NK = (x_NK * _inverse(scale_N1) + (half + 0.5)).trunc_()
        return _half(scale_N1)[0], codes_NK.clamp_(0, 2 * half - 1).to(torch.uint8)
    stored, step_N1 = _half(rounding.symmetric(x_NK, w_NK, half))
    return stored, ((x_NK * _inverse(step_N1)).round_() + half).clamp_(0, 2 * half - 1).to(torch.uint8)


def _spanned(x_NK: Tensor, w_NK: Tensor | None, highest: int) -> tuple[Tensor, Tensor]:
    """Quantize 32 weights to a scale, a minimum and codes: Q4_1 and Q5_1."""
    if w_NK is None:
        least_N1, most_N1 = x_NK.aminmax(dim=1, keepdim=True)
        scale_N1 = (most_N1 - least_N1) / highest
        codes_NK = ((x_NK - least_N1) * _inverse(scale_N1) + 0.5).trunc_()
        return torch.cat((_half(scale_N1)[0], _half(least_N1)[0]), 1), codes_NK.clamp_(0, highest).to(torch.uint8)
    (scale, step_N1), (least, least_N1) = map(_half, rounding.with_minimum(x_NK, w_NK, highest, below_zero=False))
    codes_NK = ((x_NK - least_N1) * _inverse(step_N1)).round_().clamp_(0, highest).to(torch.uint8)
    return torch.cat((scale, least), 1), codes_NK


def _q4_0(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    scale, codes_NK = _centred(x_NK, w_NK, 8)
    return torch.cat((scale, _nibbles(codes_NK)), 1)


def _q4_1(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    scales, codes_NK = _spanned(x_NK, w_NK, 15)
    return torch.cat((scales, _nibbles(codes_NK)), 1)


def _q5_0(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    scale, codes_NK = _centred(x_NK, w_NK, 16)
    return torch.cat((scale, _with_fifth_bits(codes_NK)), 1)


def _q5_1(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    scales, codes_NK = _spanned(x_NK, w_NK, 31)
    return torch.cat((scales, _with_fifth_bits(codes_NK)), 1)


def _q8_0(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    """Halves are rounded away from zero, as the package gguf does. Importance would change next to nothing here."""
    scale_N1 = x_NK.abs().amax(1, keepdim=True) / 127
    exact_NK = x_NK * _inverse(scale_N1)
    size_NK = exact_NK.abs()
    whole_NK = size_NK.floor()
    codes_NK = exact_NK.sign() * (whole_NK + (2 * (size_NK - whole_NK)).floor_())
    return torch.cat((_half(scale_N1)[0], codes_NK.to(torch.int8).view(torch.uint8)), 1)


def _spanned_groups(
    x_NK: Tensor, w_NK: Tensor | None, size: int, highest: int, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize blocks of G groups of ``size`` weights; each group has a scale and a minimum, which are small integers
    times a float16.

    Returns the two float16 as bytes ``[N, 4]``, the integers ``[N, G]`` of scales and of minimums up to ``most``, and
    codes ``[N, G, size]``.
    """
    x_MS = x_NK.reshape(-1, size)
    w_MS = _usual(x_MS) if w_NK is None else w_NK.reshape(-1, size)
    of_a_group = w_MS.sum(1).view(len(x_NK), -1)
    stored, small, steps = [], [], []
    for found in rounding.with_minimum(x_MS, w_MS, highest):
        sizes_NG = found.abs().view_as(of_a_group)
        as_bytes, step_N1 = _half(rounding.positive(sizes_NG, of_a_group, most))
        small_NG = (sizes_NG * _inverse(step_N1)).round_().clamp_(0, most)
        stored.append(as_bytes)
        small.append(small_NG.to(torch.uint8))
        steps.append((small_NG * step_N1)[:, :, None])
    x_NGS = x_NK.view(*of_a_group.shape, size)
    codes = ((x_NGS + steps[1]) * _inverse(steps[0])).round_().clamp_(0, highest).to(torch.uint8)
    return torch.cat(stored, 1), small[0], small[1], codes


def _six_bits(scales_N8: Tensor, minimums_N8: Tensor) -> Tensor:
    """Pack the six-bit scales and minimums of Q4_K and Q5_K into twelve bytes."""
    (scale, late), (minimum, late_minimum) = scales_N8.chunk(2, 1), minimums_N8.chunk(2, 1)
    low = late & 15 | (late_minimum & 15) << 4
    return torch.cat((scale | late >> 4 << 6, minimum | late_minimum >> 4 << 6, low), 1)


def _q4_k(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    halves, scales, minimums, codes = _spanned_groups(x_NK, w_NK, 32, 15, 63)
    nibbles = _nibbles(codes.view(-1, 4, 64)).flatten(1)
    return torch.cat((halves, _six_bits(scales, minimums), nibbles), 1)


def _q5_k(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    halves, scales, minimums, codes = _spanned_groups(x_NK, w_NK, 32, 31, 63)
    nibbles = _nibbles(codes.view(-1, 4, 64)).flatten(1)
    return torch.cat((halves, _six_bits(scales, minimums), _gathered(codes >> 4, 1), nibbles), 1)


def _centred_groups(x_NK: Tensor, w_NK: Tensor | None, half: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize blocks of 16 groups of 16 weights; each group's scale is a small integer times a float16: Q3_K and Q6_K.

    Returns the float16 as bytes ``[N, 2]``, the integers ``[N, 16]`` from -``largest`` on, and codes ``[N, 256]`` from
    0 on.
    """
    x_MS = x_NK.reshape(-1, 16)
    w_MS = _usual(x_MS) if w_NK is None else w_NK.reshape(-1, 16)
    scales_NG = rounding.symmetric(x_MS, w_MS, half).view(-1, 16)
    stored, small_NG, steps = _signed_scales(scales_NG, largest)
    codes = (x_NK.view(-1, 16, 16) * _inverse(steps)).round_().clamp_(-half, half - 1) + half
    return stored, small_NG, codes.to(torch.uint8).flatten(1)


def _signed_scales(scales_NG: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Write scales as integers from -``largest`` to ``largest`` - 1 times a float16; the largest scale becomes
    -``largest``.

    Returns the float16 as bytes, the integers, and the scales that result, ``[N, G, 1]``.
    """
    extreme_N1 = scales_NG.gather(1, scales_NG.abs().argmax(1, keepdim=True))
    stored, step_N1 = _half(extreme_N1 / -largest)
    small_NG = (scales_NG * _inverse(step_N1)).round_().clamp_(-largest, largest - 1)
    return stored, small_NG.to(torch.int8), (small_NG * step_N1)[:, :, None]


def _q2_k(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    halves, scales, minimums, codes = _spanned_groups(x_NK, w_NK, 16, 3, 15)
    return torch.cat((scales | minimums << 4, _pairs(codes.flatten(1)), halves), 1)


def _q3_k(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    """Scales have six bits: the low nibbles of scales 0 to 7 and 8 to 15 in eight bytes, then the high bits in four."""
    scale, small, codes = _centred_groups(x_NK, w_NK, 4, 32)
    small = (small + 32).view(torch.uint8)
    scales = torch.cat((_nibbles(small), _gathered((small >> 4).view(-1, 4, 4), 2)), 1)
    return torch.cat((_gathered((codes >> 2).view(-1, 8, 32), 1), _pairs(codes & 3), scales, scale), 1)


def _pairs(codes_NK: Tensor) -> Tensor:
    """Pack two-bit codes ``[N, 256]``: four neighbouring groups of 32 share 32 bytes."""
    return _gathered(codes_NK.view(-1, 2, 4, 32), 2).flatten(1)


def _q6_k(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    scale, small, codes = _centred_groups(x_NK, w_NK, 32, 128)
    quarters = codes.view(-1, 2, 4, 32)
    low = _nibbles(quarters.reshape(-1, 2, 128)).flatten(1)
    return torch.cat((low, _gathered(quarters >> 4, 2).flatten(1), small.view(torch.uint8), scale), 1)


def _iq4_nl(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    scale, step_N1 = _half(rounding.from_table(x_NK, _usual(x_NK) if w_NK is None else w_NK, NONLINEAR))
    return torch.cat((scale, _nibbles(_nearest(x_NK, step_N1))), 1)


def _iq4_xs(x_NK: Tensor, w_NK: Tensor | None) -> Tensor:
    x_MS = x_NK.reshape(-1, 32)
    w_MS = _usual(x_MS) if w_NK is None else w_NK.reshape(-1, 32)
    scales_N8 = rounding.from_table(x_MS, w_MS, NONLINEAR).view(-1, 8)
    scale, small, steps = _signed_scales(scales_N8, 32)
    small = (small + 32).view(torch.uint8)
    high, low = _gathered((small >> 4).view(-1, 2, 4, 1), 2).flatten(1), _gathered((small & 15).view(-1, 4, 2, 1), 4)
    codes = _nearest(x_NK.view(-1, 8, 32), steps)
    return torch.cat((scale, high, low.flatten(1), _nibbles(codes).flatten(1)), 1)


def _nearest(x: Tensor, steps: Tensor) -> Tensor:
    """Codes of ``x``, of any shape; ``steps`` are scales of any shape that broadcasts with it."""
    return rounding.nearest_of(x * _inverse(steps), NONLINEAR)


WRITERS: Mapping[Format, _Writer] = {
    Format.Q4_0: _q4_0,
    Format.Q4_1: _q4_1,
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
}
