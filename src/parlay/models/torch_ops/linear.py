"""Linear layers whose rows do not depend on the rows beside them, and the test that says whether they do.

oneDNN's packed product sums each output in one order for any number of rows from two up. It is not public API of
torch: where it is missing, or refuses a dtype, `F.linear` takes its place, and `rows_independent` judges it alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.part import Group

MIN_ROWS = 2
"""One row alone takes other kernels (measured: fp32 from 1,536 inputs on), which are no faster here."""

_EACH = 16  # row counts up to here are told apart
_SIZES = 8  # row counts per doubling beyond

_BATCH_HINT = 16
_TESTED_ROWS = (2, 3, 5, 8, 17, 33)


def padded(rows: int) -> int:
    """How many rows to multiply where so many are wanted: one of few counts, at most an eighth more.

    oneDNN compiles a kernel for each number of rows that it meets. That takes longer than the product (measured: 3 to
    30 ms), and half a megabyte, and a thousand of them are kept.
    """
    if rows <= _EACH:
        return max(rows, MIN_ROWS)
    step = (1 << (rows - 1).bit_length() - 1) // _SIZES
    return -(-rows // step) * step


class PackedLinear:
    """``weight`` ``[O, I]`` in oneDNN's blocked layout, its own copy, and ``bias`` ``[O]``."""

    __slots__ = ("_bias", "_call", "_weight", "dtype", "in_features", "out_features")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.dtype = weight_OI.dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _BATCH_HINT)
        self._bias = bias_O
        self._call = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_NI: Tensor) -> Tensor:
        result: Tensor = self._call(x_NI, self._weight, self._bias, "none", [], "")
        return result


class PlainLinear:
    """`F.linear` over ``weight`` ``[O, I]`` as it is, and ``bias`` ``[O]``."""

    __slots__ = ("_bias", "_weight", "dtype", "in_features", "out_features")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.dtype = weight_OI.dtype
        self._weight, self._bias = weight_OI.contiguous(), bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self._weight, self._bias)

    def with_weight(self, move: Callable[[Tensor], Tensor]) -> PlainLinear:
        """Make the same product with what ``move`` makes of its weight."""
        return PlainLinear(move(self._weight), self._bias)


class RecordedLinear:
    """``linear``, which adds up the squares of its inputs in ``sums_I``."""

    __slots__ = ("_linear", "dtype", "in_features", "out_features", "sums_I")

    def __init__(self, linear: Linear, sums_I: Tensor) -> None:
        self.out_features: int = linear.out_features
        self.in_features: int = linear.in_features
        self.dtype: torch.dtype = linear.dtype
        self._linear, self.sums_I = linear, sums_I

    def __call__(self, x_NI: Tensor) -> Tensor:
        self.sums_I += x_NI.square().sum(0)
        return self._linear(x_NI)


def summed(own_NO: Tensor, group: Group | None) -> Tensor:
    """The sums over what all processes of a group give, added in float32; without one what this process gives."""
    if group is None:
        return own_NO
    sums_NO = own_NO.to(group.device, torch.float32).contiguous()
    group.add(sums_NO)
    return sums_NO.to(own_NO.device, own_NO.dtype)


Linear = PackedLinear | PlainLinear | RecordedLinear
"""``[N, I] -> [N, O]``: N rows, I inputs, O outputs. Callers give at least `MIN_ROWS` rows."""


def moved(linear: Linear, move: Callable[[Tensor], Tensor]) -> PlainLinear:
    """Make the same product with what ``move`` makes of its weight. Only such over a plain matrix can be moved."""
    assert isinstance(linear, PlainLinear), f"{type(linear).__name__} has its weight in a layout of its own"
    return linear.with_weight(move)


def pack(weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
    """The fastest linear layer for these weights, on their device and in their dtype."""
    if weight_OI.device.type != "cpu":
        return PlainLinear(weight_OI, bias_O)
    try:
        packed = PackedLinear(weight_OI, bias_O)
        packed(torch.zeros(MIN_ROWS, packed.in_features, dtype=weight_OI.dtype))
    except (AttributeError, RuntimeError):  # the operator is absent, or refuses this dtype on this processor
        return PlainLinear(weight_OI.clone(), bias_O)  # the weight may be a view of a mapped file
    return packed


def rows_independent(linear: Linear) -> bool:
    """Whether random rows come out bit for bit the same in products of 2 to 33 rows, first and last alike."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_TESTED_ROWS), linear.in_features, generator=generator).to(linear.dtype)
    whole = linear(x)
    return all(
        torch.equal(linear(x[:rows]), whole[:rows]) and torch.equal(linear(x[-rows:]), whole[-rows:])
        for rows in _TESTED_ROWS
    )
