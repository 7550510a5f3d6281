"""Finds scales for groups of weights with few codes, by the least weighted squared error.

The best scale for given codes is the least-squares one, and the best codes for a given scale are the nearest ones. So
several scales around the one that just spans a group are tried: each gives codes, the codes give their best scale, and
the scale with the least error wins. It gives new codes, and so on for a few rounds. Shapes: N groups of K weights
``x_NK``; ``w_NK`` are the weights of squared errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

_SHIFTS = tuple(step / 20 for step in range(-18, 19, 3))
"""The number of codes by which a tried scale spans more or fewer than there are."""
_ROUNDS = 3
_Codes = Callable[[Tensor], Tensor]


def symmetric(x_NK: Tensor, w_NK: Tensor, half: int) -> Tensor:
    """Scales ``[N, 1]`` for codes from -``half`` to ``half`` - 1; negative if the number of largest magnitude is
    positive."""
    extreme_N1 = _nonzero(x_NK.gather(1, x_NK.abs().argmax(1, keepdim=True)))

    def codes(inverse_N1: Tensor) -> Tensor:
        return (x_NK * inverse_N1).round_().clamp_(-half, half - 1)

    return _best(x_NK, w_NK, [(half + shift) / -extreme_N1 for shift in _SHIFTS], codes)


def positive(x_NK: Tensor, w_NK: Tensor, highest: int) -> Tensor:
    """Scales ``[N, 1]`` of non-negative numbers, for codes from 0 to ``highest``."""
    most_N1 = _nonzero(x_NK.amax(1, keepdim=True))

    def codes(inverse_N1: Tensor) -> Tensor:
        return (x_NK * inverse_N1).round_().clamp_(0, highest)

    return _best(x_NK, w_NK, [(highest + shift) / most_N1 for shift in _SHIFTS], codes)


def from_table(x_NK: Tensor, w_NK: Tensor, table: Sequence[int]) -> Tensor:
    """Scales ``[N, 1]`` for codes from a rising int8 ``table``, whose first value has the largest magnitude."""
    extreme_N1 = _nonzero(x_NK.gather(1, x_NK.abs().argmax(1, keepdim=True)))
    values = torch.tensor(table, dtype=torch.float32)[_nearest_places(table).long()]

    def nearest(inverse_N1: Tensor) -> Tensor:
        return values[_looked_up(x_NK * inverse_N1)]

    return _best(x_NK, w_NK, [(table[0] - 16 * shift) / extreme_N1 for shift in _SHIFTS], nearest)


def nearest_of(x: Tensor, table: Sequence[int]) -> Tensor:
    """The indices of the values in a rising int8 ``table`` nearest to ``x``, of any shape; uint8."""
    return _nearest_places(table)[_looked_up(x)]


def with_minimum(x_NK: Tensor, w_NK: Tensor, highest: int, *, below_zero: bool = True) -> tuple[Tensor, Tensor]:
    """Scales and minimums ``[N, 1]`` for codes from 0 to ``highest``; with ``below_zero`` no minimum is above 0."""
    least_N1, most_N1 = x_NK.aminmax(dim=1, keepdim=True)
    if below_zero:
        least_N1 = least_N1.clamp(max=0)
    span_N1, weighted_NK = _nonzero(most_N1 - least_N1), w_NK * x_NK
    sum_w, sum_x = w_NK.sum(1, keepdim=True), weighted_NK.sum(1, keepdim=True)
    best, scale, minimum = torch.full_like(least_N1, -torch.inf), torch.zeros_like(least_N1), least_N1.clone()
    for step in range(len(_SHIFTS) + _ROUNDS):
        again = step >= len(_SHIFTS)
        from_N1, inverse = (minimum, 1 / _nonzero(scale)) if again else (least_N1, (highest + _SHIFTS[step]) / span_N1)
        codes_NK = (x_NK - from_N1).mul_(inverse).round_().clamp_(0, highest)
        sum_l, sum_xl = (w_NK * codes_NK).sum(1, keepdim=True), (weighted_NK * codes_NK).sum(1, keepdim=True)
        sum_ll = (w_NK * codes_NK.square_()).sum(1, keepdim=True)
        apart = sum_w * sum_ll - sum_l.square()
        tried, lowest = (sum_w * sum_xl - sum_x * sum_l) / apart, (sum_ll * sum_x - sum_l * sum_xl) / apart
        if below_zero:
            tried, lowest = torch.where(lowest > 0, sum_xl / sum_ll, tried), lowest.clamp(max=0)
        gain = tried * sum_xl + lowest * sum_x  # the error is the sum of w x^2 minus this
        better = (apart > 0) & (gain > best)
        best, scale = torch.where(better, gain, best), torch.where(better, tried, scale)
        minimum = torch.where(better, lowest, minimum)
    return scale, minimum


def _best(x_NK: Tensor, w_NK: Tensor, inverses: Sequence[Tensor], codes: _Codes) -> Tensor:
    """The best scale of each group, from the ``inverses`` tried, improved for a few rounds."""
    weighted_NK = w_NK * x_NK
    best = torch.zeros(len(x_NK), 1)
    scale = torch.zeros_like(best)
    for step in range(len(inverses) + _ROUNDS):
        codes_NK = codes(inverses[step] if step < len(inverses) else 1 / _nonzero(scale))
        along = (weighted_NK * codes_NK).sum(1, keepdim=True)
        square = (w_NK * codes_NK.square_()).sum(1, keepdim=True)
        found = along / square
        gain = along * found  # the error is the sum of w x^2 minus this
        better = (square > 0) & (gain > best)
        best, scale = torch.where(better, gain, best), torch.where(better, found, scale)
    return scale


def _nearest_places(table: Sequence[int]) -> Tensor:
    """The index of the nearest value in a rising ``table`` for each int8 from -128 on; uint8 ``[256]``."""
    between = torch.tensor([(low + high) / 2 for low, high in pairwise(table)])
    return torch.bucketize(torch.arange(-128.0, 128), between).to(torch.uint8)


def _looked_up(x: Tensor) -> Tensor:
    """Round ``x``, of any shape, to indices of int8 values from -128 on."""
    return x.round().clamp_(-128, 127).add_(128).int()


def _nonzero(x: Tensor) -> Tensor:
    """Replace 0 by 1 in ``x`` of any shape."""
    return torch.where(x == 0, torch.ones_like(x), x)
