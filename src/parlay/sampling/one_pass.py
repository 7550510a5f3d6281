"""Tokens of rows in one pass over each, or two, by the compiled library: nothing is written but the tokens."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.compiled import structs
from parlay.sampling import noise
from parlay.types import SamplingParams


def draw(logits_V: Tensor, params: SamplingParams, state: int) -> int | None:
    """The token of a row of logits that no more is done to: temperature above 0, truncation, the noise of a stream.

    None where the library can't say, so that the steps one by one must decide: it isn't there, or does not read such a
    row; something depends on how numbers are rounded; the request has typical-p; or no token can be drawn.
    """
    core = _reader(logits_V)
    if core is None or params.typical_p < 1:
        return None
    least = math.log(params.min_p) if params.min_p else -math.inf
    row = logits_V.data_ptr(), logits_V.numel()
    token = core.draw(*row, params.temperature, params.top_k, params.top_p, least, state)
    return token if token >= 0 else None


def leading(
    logits_RV: Tensor, count: int, wanted: Sequence[int] | None = None, barred: Sequence[int] = ()
) -> list[list[tuple[int, float]]] | None:
    """The tokens of each row's ``count`` largest logits, largest first, equal ones by rising id; none of a bad row.

    With each comes its probability by the row's softmax. ``wanted`` are rows that follow each other; None: all. The
    logits of ``barred`` tokens become -inf before. None where the library isn't there, or does not read the rows.
    """
    core = _reader(logits_RV)
    if core is None:
        return None
    rows, size = logits_RV.shape
    at, rows = (0, rows) if wanted is None else (4 * size * wanted[0], len(wanted))
    ids, chances, counts = _int32s(rows * count), (ctypes.c_float * (rows * count))(), _int32s(rows)
    bars = (ctypes.c_int32 * len(barred))(*barred)
    core.leading(logits_RV.data_ptr() + at, rows, size, bars, len(barred), count, ids, chances, counts)
    found = list(zip(ids, chances, strict=True))
    return [found[row * count : row * count + each] for row, each in enumerate(counts)]


def likeliest(logits_RV: Tensor) -> list[int] | None:
    """The token of each row's largest logit, of equal ones the lowest id.

    None where a row is bad, the library isn't there, or does not read the rows.
    """
    core = _reader(logits_RV)
    if core is None:
        return None
    rows, size = logits_RV.shape
    ids, counts = _int32s(rows), _int32s(rows)
    core.leading(logits_RV.data_ptr(), rows, size, None, 0, 1, ids, None, counts)
    return list(ids) if all(counts) else None


def _int32s(count: int) -> ctypes.Array[ctypes.c_int32]:
    """Room for so many numbers."""
    return (ctypes.c_int32 * count)()


def is_read(logits: Tensor) -> bool:
    """Whether the library reads such ``logits`` ``[..., V]``, so that rows gain nothing by being sampled together."""
    return _reader(logits) is not None


def _reader(logits: Tensor) -> structs.Core | None:
    """The library, where it is there and reads such ``logits`` ``[..., V]``."""
    is_plain = logits.is_cpu and logits.dtype == torch.float32 and logits.is_contiguous()
    return noise.compiled() if is_plain else None
