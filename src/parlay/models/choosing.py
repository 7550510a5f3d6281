"""Chooses whether the compiled decoder or torch's operators run a model, and describes the runner that results."""

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
    """Makes a runner's decoder, and says in one line which it is and why; see `choose_forward`."""

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
    """Make the compiled decoder if it can run the model, else torch's operators; the second result says in one line
    which and why.

    Weights beyond ``room`` are read in every forward, from disk or, on a CUDA device, from the host's memory. Raises
    UnsupportedModel if the user chose a cache type or a memory limit that only the compiled decoder honours, and it
    can't run here. With ``graphs``, CUDA devices run steps as CUDA graphs.
    """
    if device.type == "cpu":
        try:
            compiled = CompiledForward(config, weights, dtype, packed, cached, part=part, room=room)
        except NotLoaded as reason:
            if room is not None and room.explicit:
                raise UnsupportedModel(
                    f"memory weights={room.bytes}: only the compiled decoder reads layers from disk, and {reason}",
                    "memory",
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
    """Describe a runner of this decoder; its name is still empty. With ``in_blocks`` each row sees all rows of its
    block."""
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
        likeliest=kernels.likeliest and config.shallow is None and config.canvas is None,
        canvas=config.canvas,
        kv_heads=0 if kernels.part or config.is_uneven else config.num_kv_heads,
        head_dim=config.head_dim,
        in_flight=kernels.in_flight,
        streamed_bytes=kernels.streamed_bytes,
    )


class CacheRefused(UnsupportedModel):
    """Raised where keys and values can't be cached in the requested type."""

    def __init__(self, kv_cache_dtype: str, why: str) -> None:
        super().__init__(
            f"kv_cache_dtype {kv_cache_dtype} can't be had here: {why}; leave it at auto", "kv_cache_dtype"
        )


class CompileRefused(UnsupportedModel):
    """Raised where torch.compile was requested for a model that the native decoder runs."""

    def __init__(self, model: str) -> None:
        super().__init__(f"{model} runs on Parlay's own decoder, not by torch.compile: remove compile", "compile")


@lru_cache
def _warn_once(reason: str) -> None:
    _log.warning("no compiled decoder: %s; torch's operators decode instead, which takes longer", reason)
