"""Chooses kernels and dtype once, by trying, with the reason in one line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import torch

from parlay.models.config import DecoderConfig
from parlay.models.torch_ops.attention_form import Form, choose_form
from parlay.models.torch_ops.decoder import EagerDecoder
from parlay.models.torch_ops.linear import Linear, PackedLinear, pack, rows_independent
from parlay.types import Exactness


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of testing kernels; ``form`` is None if attention has no exact form, and masked attention is used."""

    form: Form | None
    exactness: Exactness
    reason: str


def judge(decoder: EagerDecoder, device: torch.device, *, paged: bool = False) -> Judgement:
    """Test with the model's own products whether a row depends on the other rows.

    With ``paged`` Triton's kernels compute attention, whose rows don't; those of linear layers may.
    """
    linears = _distinct_linears(decoder)
    kind = "oneDNN packed" if all(isinstance(linear, PackedLinear) for linear in linears) else "torch"
    if paged:
        return Judgement(None, Exactness.SEED, f"{kind} linears, attention over pages by Triton")
    if device.type != "cpu":
        return Judgement(None, Exactness.SEED, f"{kind} linears, masked attention: no exact form on {device.type}")
    with torch.no_grad():
        form = choose_form(frozenset(layer.heads for layer in decoder.layers), decoder.compute)
        dependent = [linear for linear in linears if not rows_independent(linear)]
    if form is None:
        return Judgement(None, Exactness.SEED, f"{kind} linears, masked attention: no exact form of products here")
    padding = f"attention padded to {form.rows} rows and {form.keys} keys"
    if dependent:
        shapes = ", ".join(f"{linear.in_features} to {linear.out_features}" for linear in dependent)
        return Judgement(form, Exactness.SEED, f"{kind} linears, {padding}; rows depend on each other in {shapes}")
    return Judgement(form, Exactness.BITS, f"{kind} linears, {padding}: rows do not depend on each other")


def _distinct_linears(decoder: EagerDecoder) -> list[Linear]:
    """One linear layer per shape, as kernels depend on nothing else."""
    linears = [decoder.head, *([] if decoder.per_layer is None else [decoder.per_layer.projection])]
    for layer in decoder.layers:
        linears += [layer.qkv, layer.attention_out, *layer.mlp.linears]
        if layer.per_layer is not None:
            linears += [layer.per_layer.gate, layer.per_layer.out]
    return list({(linear.in_features, linear.out_features, linear.dtype): linear for linear in linears}.values())


_TIMED_ROWS = (1, 8)
_TIMED_DTYPES = (torch.float32, torch.bfloat16)
_TIMED_CALLS, _TIMED_SECONDS = 15, 0.5
_MAX_TIMED_WEIGHTS = 1 << 26  # 64 M weights: too many for any cache, and few enough to pack quickly
_WORTH_FLOAT32 = 1.2  # bfloat16 halves memory traffic, so float32 must be faster by more than noise


@lru_cache
def choose_dtype(config: DecoderConfig, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype that decodes fastest here, and why, in one line.

    On a CPU the model's largest linear layer is timed with 1 and 8 rows in float32 and bfloat16: without hardware
    support bfloat16 can be hundreds of times slower.
    """
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16, "the GPU computes in bfloat16"
    if device.type != "cpu":
        return torch.float32, f"bfloat16 is not known to be fast on {device.type}"
    seconds = _time_linears(config)
    single, half = (sum(seconds[dtype]) for dtype in (torch.float32, torch.bfloat16))
    figures = "; ".join(
        f"{str(dtype).removeprefix('torch.')} {one * 1e6:.0f} and {eight * 1e6:.0f} us"
        for dtype, (one, eight) in seconds.items()
    )
    best = torch.float32 if half > _WORTH_FLOAT32 * single else torch.bfloat16
    return best, f"largest linear layer at 1 and 8 rows: {figures}"


def _time_linears(config: DecoderConfig) -> dict[torch.dtype, tuple[float, float]]:
    """Least seconds of a call with 1 and with 8 rows, by dtype, for a weight of the largest layer's shape.

    Dtypes are timed alternately on one thread, so that other load changes the times but not their order.
    """
    widest = max(config.vocab_size, 2 * config.intermediate_size)
    width = min(widest, _MAX_TIMED_WEIGHTS // config.hidden_size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            linears = {dtype: pack(torch.zeros(width, config.hidden_size, dtype=dtype)) for dtype in _TIMED_DTYPES}
            least = _least_seconds(linears, config.hidden_size)
    finally:
        torch.set_num_threads(threads)
    one, eight = _TIMED_ROWS
    return {dtype: (least[dtype, one], least[dtype, eight]) for dtype in _TIMED_DTYPES}


def _least_seconds(linears: dict[torch.dtype, Linear], width: int) -> dict[tuple[torch.dtype, int], float]:
    inputs = {(dtype, rows): torch.zeros(rows, width, dtype=dtype) for dtype in linears for rows in _TIMED_ROWS}
    least = dict.fromkeys(inputs, float("inf"))
    until = time.perf_counter() + _TIMED_SECONDS
    for turn in range(_TIMED_CALLS):
        if turn > 1 and time.perf_counter() > until:
            break
        for (dtype, rows), x in inputs.items():
            begin = time.perf_counter()
            linears[dtype](x)
            least[dtype, rows] = min(least[dtype, rows], time.perf_counter() - begin)
    return least
