"""Scales for groups of weights that are rounded to few codes: those of the least weighted squared error.

The best scale for given codes is that of least squares, and the best codes for a given scale are the nearest ones. So
scales around the one that just spans a group are tried: each gives codes, the codes give the best scale for them, and
the scale with the least error stays. It gives codes once more, and so on for a few rounds. N groups of K weights
``x_NK``; ``w_NK`` are the weights of squared errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

_SHIFTS = tuple(step / 20 for step in range(-18, 19, 3))
"""By how many codes more or fewer than there are a tried scale spans a group."""
_ROUNDS = 3
_Codes = Callable[[Tensor], Tensor]


def symmetric(x_NK: Tensor, w_NK: Tensor, half: int) -> Tensor:
    """Scales ``[N, 1]`` for codes from -``half`` to ``half`` - 1; negative where the largest number is positive."""
    extreme_N1 = _nonzero(x_NK.gather(1, x_NK.abs().argmax(1, keepdim=True)))

    def codes(inverse_N1: Tensor) -> Tensor:
        return (x_NK * inverse_N1).round_().clamp_(-half, half - 1)

    return _best(x_NK, w_NK, [(half + shift) / -extreme_N1 for shift in _SHIFTS], codes)


def positive(x_NK: Tensor, w_NK: Tensor, highest: int) -> Tensor:
    """Scales ``[N, 1]`` of numbers that are not negative, for codes from 0 to ``highest``."""
    most_N1 = _nonzero(x_NK.amax(1, keepdim=True))

    def codes(inverse_N1: Tensor) -> Tensor:
        return (x_NK * inverse_N1).round_().clamp_(0, highest)

    return _best(x_NK, w_NK, [(highest + shift) / most_N1 for shift in _SHIFTS], codes)


def from_table(x_NK: Tensor, w_NK: Tensor, table: Sequence[int]) -> Tensor:
    """Scales ``[N, 1]`` for values of a rising ``table`` of int8, of which the first is the largest in size."""
    extreme_N1 = _nonzero(x_NK.gather(1, x_NK.abs().argmax(1, keepdim=True)))
    values = torch.tensor(table, dtype=torch.float32)[_nearest_places(table).long()]

    def nearest(inverse_N1: Tensor) -> Tensor:
        return values[_looked_up(x_NK * inverse_N1)]

    return _best(x_NK, w_NK, [(table[0] - 16 * shift) / extreme_N1 for shift in _SHIFTS], nearest)


def nearest_of(x: Tensor, table: Sequence[int]) -> Tensor:
    """The places in a rising ``table`` of int8 of the values nearest to ``x``, of any shape; uint8."""
    return _nearest_places(table)[_looked_up(x)]


def with_minimum(x_NK: Tensor, w_NK: Tensor, highest: int, *, below_zero: bool = True) -> tuple[Tensor, Tensor]:
    """Scales and minimums ``[N, 1]`` for codes from 0 to ``highest``; no minimum is above 0 where ``below_zero``."""
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
        gain = tried * sum_xl + lowest * sum_x  # the error is the sum of w x^2 less this
        better = (apart > 0) & (gain > best)
        best, scale = torch.where(better, gain, best), torch.where(better, tried, scale)
        minimum = torch.where(better, lowest, minimum)
    return scale, minimum


def _best(x_NK: Tensor, w_NK: Tensor, inverses: Sequence[Tensor], codes: _Codes) -> Tensor:
    """The best scales among those whose ``inverses`` are tried, and those that follow from the best."""
    weighted_NK = w_NK * x_NK
    best = torch.zeros(len(x_NK), 1)
    scale = torch.zeros_like(best)
    for step in range(len(inverses) + _ROUNDS):
        codes_NK = codes(inverses[step] if step < len(inverses) else 1 / _nonzero(scale))
        along = (weighted_NK * codes_NK).sum(1, keepdim=True)
        square = (w_NK * codes_NK.square_()).sum(1, keepdim=True)
        found = along / square
        gain = along * found  # the error is the sum of w x^2 less this
        better = (square > 0) & (gain > best)
        best, scale = torch.where(better, gain, best), torch.where(better, found, scale)
    return scale


def _nearest_places(table: Sequence[int]) -> Tensor:
    """For each int8, from -128 on, the place of the nearest value in a rising ``table``; uint8 ``[256]``."""
    between = torch.tensor([(low + high) / 2 for low, high in pairwise(table)])
    return torch.bucketize(torch.arange(-128.0, 128), between).to(torch.uint8)


def _looked_up(x: Tensor) -> Tensor:
    """Numbers ``x`` of any shape as places among all int8, from -128 on."""
    return x.round().clamp_(-128, 127).add_(128).int()


def _nonzero(x: Tensor) -> Tensor:
    """Put 1 for 0 in ``x`` of any shape."""
    return torch.where(x == 0, torch.ones_like(x), x)
