"""Chooses which decoder runs a model, the compiled one or torch's operators, and says what a runner does by it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Protocol

import torch

from parlay.compiled.library import NotBuilt, NotLoaded
from parlay.models.compiled.forward import CompiledForward
from parlay.models.compiled.streaming import WeightRoom
from parlay.models.compiled.weights import Packed
from parlay.models.config import DecoderConfig, UnsupportedModel
from parlay.models.forward import Forward
from parlay.models.part import WHOLE, Part
from parlay.models.torch_ops.eager import EagerForward
from parlay.models.torch_ops.step_graphs import CudaRecorder
from parlay.models.torch_ops.streaming import CudaLane
from parlay.models.weights.fused import Operand
from parlay.types import RunnerSpec

_log = logging.getLogger(__name__)


class MakeForward(Protocol):
    """Makes the decoder of a runner, and says which it is, and why, in one line; see `choose_forward`."""

    def __call__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Operand],
        dtype: torch.dtype,
        device: torch.device,
        *,
        packed: Packed,
        cached: str,
    ) -> tuple[Forward, str]: ...


def choose_forward(
    config: DecoderConfig,
    weights: Mapping[str, Operand],
    dtype: torch.dtype,
    device: torch.device,
    *,
    packed: Packed,
    cached: str,
    part: Part = WHOLE,
    room: WeightRoom | None = None,
    graphs: bool = True,
) -> tuple[Forward, str]:
    """The compiled decoder where it runs, else torch's operators; and which it is, and why, in one line.

    Weights beyond ``room`` are read from disk in every forward, on a CUDA device from the host's memory. Raises
    UnsupportedModel where that was asked for, and torch's operators would run on a CPU. With ``graphs`` CUDA devices
    run steps as CUDA graphs.
    """
    if device.type == "cpu":
        try:
            compiled = CompiledForward(config, weights, dtype, packed, cached, part=part, room=room)
        except NotLoaded as reason:
            if room is not None and room.said:
                raise UnsupportedModel(
                    f"memory weights={room.bytes}: only the compiled decoder reads layers from disk, and {reason}"
                ) from None
            if cached != "auto":
                raise CacheRefused(cached, f"only the compiled decoder has it, and {reason}") from None
            why = f"; no compiled decoder: {reason}"
            if isinstance(reason, NotBuilt):
                _warn_once(str(reason))
        else:
            return compiled, compiled.kernels.reason
    elif cached != "auto":
        raise CacheRefused(cached, f"only the compiled decoder has it, which is for CPUs, not {device.type}")
    else:
        why = ""
    streaming = (room, CudaLane(device)) if room is not None and device.type == "cuda" else None
    recorder = partial(CudaRecorder, device) if graphs and device.type == "cuda" and part == WHOLE else None
    eager = EagerForward(config, weights, dtype, device, part, streaming=streaming, recorder=recorder)
    return eager, f"{eager.kernels.reason}{why}"


def spec_of(
    forward: Forward, config: DecoderConfig, dtype: torch.dtype, device: torch.device, *, in_blocks: bool
) -> RunnerSpec:
    """Say what a runner of this decoder can do, still without a name. ``in_blocks``: rows see those of their block."""
    kernels = forward.kernels
    return RunnerSpec(
        name="",
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        tree="tree",
        exactness=kernels.exactness,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        kernels=kernels.reason,
        eos_ids=config.eos_ids,
        layer_skip=all(form.keys_of is None for form in config.forms),
        features=kernels.part is None,
        together=True,
        hides=kernels.part is None and not in_blocks,
        cheaper=isinstance(forward, CompiledForward),
        chooses=kernels.chooses and not in_blocks,
        canvas=config.canvas,
        kv_heads=0 if kernels.part or config.is_uneven else config.num_kv_heads,
        head_dim=config.head_dim,
        in_flight=kernels.in_flight,
        streamed_bytes=kernels.streamed_bytes,
    )


class CacheRefused(UnsupportedModel):
    """Keys and values can't be cached in the type that was named."""

    def __init__(self, kv_cache_dtype: str, why: str) -> None:
        super().__init__(f"kv_cache_dtype {kv_cache_dtype} can't be had here: {why}; leave it at auto")


class CompileRefused(UnsupportedModel):
    """torch.compile was asked for, and has nothing to do."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} runs on Parlay's own decoder, not by torch.compile: leave out compile")


@lru_cache
def _warn_once(reason: str) -> None:
    _log.warning("no compiled decoder: %s; torch's operators decode instead, which takes longer", reason)
