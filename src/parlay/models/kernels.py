"""Which kernels and which dtype run here, chosen once by trying, with the reason in one line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import torch

from parlay.models.attention_form import Form, choose_form
from parlay.models.config import DecoderConfig
from parlay.models.decoder import Decoder
from parlay.models.linear import Linear, PackedLinear, pack, rows_independent
from parlay.types import Exactness


@dataclass(frozen=True, slots=True)
class Kernels:
    """``form`` is None where attention has no exact form, and masked attention runs instead."""

    form: Form | None
    exactness: Exactness
    reason: str


def judge(decoder: Decoder, device: torch.device) -> Kernels:
    """Try the model's own products for independence of the rows beside a row."""
    linears = _distinct_linears(decoder)
    kind = "oneDNN packed" if all(isinstance(linear, PackedLinear) for linear in linears) else "torch"
    if device.type != "cpu":
        return Kernels(None, Exactness.SEED, f"{kind} linears, masked attention: no exact form on {device.type}")
    with torch.no_grad():
        form = choose_form(decoder.heads, decoder.compute)
        dependent = [linear for linear in linears if not rows_independent(linear)]
    if form is None:
        return Kernels(None, Exactness.SEED, f"{kind} linears, masked attention: no exact form of products here")
    padding = f"attention padded to {form.rows} rows and {form.keys} keys"
    if dependent:
        shapes = ", ".join(f"{linear.in_features} to {linear.out_features}" for linear in dependent)
        return Kernels(form, Exactness.SEED, f"{kind} linears, {padding}; rows depend on their company in {shapes}")
    return Kernels(form, Exactness.BITS, f"{kind} linears, {padding}: rows do not depend on their company")


def _distinct_linears(decoder: Decoder) -> list[Linear]:
    """One linear layer per shape: their kernels depend on nothing else."""
    first = decoder.layers[0]
    linears = (first.qkv, first.attention_out, first.gate_up, first.down, decoder.head)
    return list({(linear.in_features, linear.out_features): linear for linear in linears}.values())


_TIMED_ROWS = (1, 8)
_MAX_TIMED_WEIGHTS = 1 << 26  # 64 M weights: enough to leave every cache, few enough to pack quickly


@lru_cache
def choose_dtype(config: DecoderConfig, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype that decodes fastest here, and why, in one line.

    On CPU the model's largest linear layer is timed at 1 and 8 rows in float32 and bfloat16: where bfloat16 has no
    hardware support it can be hundreds of times slower.
    """
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16, "the GPU computes in bfloat16"
    if device.type != "cpu":
        return torch.float32, f"bfloat16 is not known to be fast on {device.type}"
    seconds = {dtype: _time_linear(config, dtype) for dtype in (torch.float32, torch.bfloat16)}
    best = min(seconds, key=lambda dtype: sum(seconds[dtype]))
    figures = "; ".join(
        f"{str(dtype).removeprefix('torch.')} {one * 1e6:.0f} and {eight * 1e6:.0f} us"
        for dtype, (one, eight) in seconds.items()
    )
    return best, f"largest linear layer at 1 and 8 rows: {figures}"


def _time_linear(config: DecoderConfig, dtype: torch.dtype) -> tuple[float, float]:
    """Least seconds of three calls for each row count, over a weight of the largest layer's shape."""
    widest = max(config.vocab_size, 2 * config.intermediate_size)
    width = min(widest, _MAX_TIMED_WEIGHTS // config.hidden_size)
    with torch.no_grad():
        linear = pack(torch.zeros(width, config.hidden_size, dtype=dtype))
        inputs = [torch.zeros(rows, config.hidden_size, dtype=dtype) for rows in _TIMED_ROWS]
        return _least_seconds(linear, inputs[0]), _least_seconds(linear, inputs[1])


def _least_seconds(linear: Linear, x: torch.Tensor) -> float:
    least = float("inf")
    linear(x)
    for _ in range(3):
        begin = time.perf_counter()
        linear(x)
        least = min(least, time.perf_counter() - begin)
    return least
