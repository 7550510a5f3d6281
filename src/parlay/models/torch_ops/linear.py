"""Linear layers whose rows do not depend on the other rows, and the test for that.

oneDNN's packed product sums each output in the same order for any number of rows from two up. It is not a public API of
torch; if it is missing or refuses a dtype, `F.linear` is used, and `rows_independent` tests it, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.part import Group

MIN_ROWS = 2
"""A single row uses other kernels (measured: float32 from 1,536 inputs on), which are no faster here."""

_EACH = 16  # up to this many rows, each count is used
_SIZES = 8  # row counts per doubling above that

_BATCH_HINT = 16
_TESTED_ROWS = (2, 3, 5, 8, 17, 33)


def padded(rows: int) -> int:
    """The number of rows to multiply for ``rows`` wanted ones: one of few counts, at most an eighth more.

    oneDNN compiles a kernel for each number of rows. That takes longer than the product (measured: 3 to 30 ms), needs
    half a megabyte, and a thousand kernels are kept.
    """
    if rows <= _EACH:
        return max(rows, MIN_ROWS)
    step = (1 << (rows - 1).bit_length() - 1) // _SIZES
    return -(-rows // step) * step


class PackedLinear:
    """A linear layer with ``weight`` ``[O, I]`` copied to oneDNN's blocked layout, and ``bias`` ``[O]``."""

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
    """A linear layer by `F.linear`, with ``weight`` ``[O, I]`` as it is, and ``bias`` ``[O]``."""

    __slots__ = ("_bias", "_weight", "dtype", "in_features", "out_features")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.dtype = weight_OI.dtype
        self._weight, self._bias = weight_OI.contiguous(), bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self._weight, self._bias)

    def with_weight(self, move: Callable[[Tensor], Tensor]) -> PlainLinear:
        """The same layer with ``move`` applied to its weight."""
        return PlainLinear(move(self._weight), self._bias)


class RecordedLinear:
    """Wraps ``linear``, and adds up the squares of its inputs in ``sums_I``."""

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
    """Sum an output over all processes of a group in float32; without a group it is returned as it is."""
    if group is None:
        return own_NO
    sums_NO = own_NO.to(group.device, torch.float32).contiguous()
    group.add(sums_NO)
    return sums_NO.to(own_NO.device, own_NO.dtype)


Linear = PackedLinear | PlainLinear | RecordedLinear
"""Maps ``[N, I]`` to ``[N, O]``, for N rows, I inputs, O outputs. Callers pass at least `MIN_ROWS` rows."""


def moved(linear: Linear, move: Callable[[Tensor], Tensor]) -> PlainLinear:
    """The same layer with ``move`` applied to its weight, which must be a plain matrix."""
    assert isinstance(linear, PlainLinear), f"{type(linear).__name__} has its weight in a layout of its own"
    return linear.with_weight(move)


def pack(weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
    """The fastest linear layer for these weights, with their device and dtype."""
    if weight_OI.device.type != "cpu":
        return PlainLinear(weight_OI, bias_O)
    try:
        packed = PackedLinear(weight_OI, bias_O)
        packed(torch.zeros(MIN_ROWS, packed.in_features, dtype=weight_OI.dtype))
    except (AttributeError, RuntimeError):  # the operator is missing, or refuses this dtype on this processor
        return PlainLinear(weight_OI.clone(), bias_O)  # the weight may be a view of a mapped file
    return packed


def rows_independent(linear: Linear) -> bool:
    """Whether random rows are bit-identical in products of 2 to 33 rows, at the beginning and at the end."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_TESTED_ROWS), linear.in_features, generator=generator).to(linear.dtype)
    whole = linear(x)
    return all(
        torch.equal(linear(x[:rows]), whole[:rows]) and torch.equal(linear(x[-rows:]), whole[-rows:])
        for rows in _TESTED_ROWS
    )
