"""Drawing from a row in one pass over it, or two, by the compiled library: nothing is written but the token."""

from __future__ import annotations

import math

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


def is_read(logits: Tensor) -> bool:
    """Whether the library reads such ``logits`` ``[..., V]``, so that rows gain nothing by being sampled together."""
    return _reader(logits) is not None


def _reader(logits: Tensor) -> structs.Core | None:
    """The library, where it is there and reads such ``logits`` ``[..., V]``."""
    is_plain = logits.is_cpu and logits.dtype == torch.float32 and logits.is_contiguous()
    return noise.compiled() if is_plain else None
