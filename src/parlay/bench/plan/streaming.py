"""Layers that are read from disk in every forward, as `parlay plan` predicts them: bytes over the disk's bandwidth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from parlay.cache.budget import format_bytes
from parlay.cost.roofline import ModelShape
from parlay.models.compiled.memory import whole_blocks
from parlay.models.compiled.streaming import open_past_cache
from parlay.models.fetch.origin import weight_files
from parlay.types import ParlayError
from parlay.types.layer_split import least_room, split_layers

_PIECE = 1 << 24  # bytes that are asked of the disk at a time
_SECONDS = 1.0


def streamed(shape: ModelShape, room: int) -> ModelShape:
    """The model with ``room`` bytes of memory for its weights. Raises ParlayError where that is too little."""
    layers = shape.num_layers
    around = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2) * shape.weight_bytes
    sizes = [round((shape.stored_bytes - around) / layers)] * layers
    split = split_layers(sizes, room - round(around))
    if split is None:
        raise ParlayError(
            f"weights in {format_bytes(room)} of memory: all take {format_bytes(round(shape.stored_bytes))}, and at "
            f"least {format_bytes(round(around) + least_room(sizes))} of it must be there"
        )
    return replace(shape, split=split if split.streamed else None)


def measure_disk(model: str, clock: Callable[[], float] = time.perf_counter) -> tuple[float, Path]:
    """Bytes per second of direct reads of a model's weights, and the file; for a second at most.

    Raises ParlayError where there is no such file.
    """
    path = max(_files_of(model), key=lambda file: file.stat().st_size, default=None)
    if path is None:
        raise ParlayError(f"no weights of {model} are here to measure the disk on: say --disk GB/S")
    descriptor, _ = open_past_cache(path)
    try:
        return _bandwidth(descriptor, clock), path
    finally:
        os.close(descriptor)


def _files_of(model: str) -> Sequence[Path]:
    from parlay.bench.plan.shapes import known_name

    return [] if known_name(model) else weight_files(model)


def _bandwidth(descriptor: int, clock: Callable[[], float]) -> float:
    piece, done, began = memoryview(whole_blocks(_PIECE).numpy()), 0, clock()
    while (count := os.preadv(descriptor, [piece], done)) > 0:
        done += count
        if clock() - began > _SECONDS or count < len(piece):
            break
    return done / max(clock() - began, 1e-9)
