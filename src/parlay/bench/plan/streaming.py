"""Finds which layers do not fit into memory, and the disk's bandwidth, to predict forwards that read them from disk."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from parlay.cache.budget import format_bytes
from parlay.cost.roofline import ModelShape
from parlay.models.compiled.layer_file import open_past_cache
from parlay.models.compiled.memory import whole_blocks
from parlay.models.fetch.origin import weight_files
from parlay.models.gguf import SUFFIX
from parlay.models.gguf.reader import read
from parlay.types import ParlayError
from parlay.types.layer_split import BUFFERS, least_room, split_layers

_PIECE = 1 << 24  # bytes of one read
_SECONDS = 1.0
_OF_A_LAYER = re.compile(r"blk\.(\d+)\.")
_OF_EXPERTS = "_exps."  # part of the names of experts in a GGUF file


class WeightSizes(NamedTuple):
    """Bytes of weights: outside the layers (``around``), of each layer, and of all experts, which are in the layers."""

    around: int
    layers: Sequence[int]
    experts: int = 0


def sizes_of(shape: ModelShape) -> WeightSizes:
    """Return the sizes that follow from a model's shape if all layers have the same size."""
    once = shape.tie_embeddings and not shape.stored_twice
    around = shape.vocab_size * shape.hidden_size * (1 if once else 2) * shape.weight_bytes
    layers = shape.num_layers
    experts = 0 if shape.mixed is None else round(shape.mixed.all_weights * shape.weight_bytes)
    return WeightSizes(round(around), [round((shape.stored_bytes - around) / layers)] * layers, experts)


def stored_sizes(model: str) -> WeightSizes | None:
    """Return the sizes as a GGUF file stores them; None if the model is not a local GGUF file.

    The file may store an embedding twice, also as the LM head.
    """
    layers, around, experts = Counter[int](), 0, 0
    for path in _files_of(model):
        if path.suffix != SUFFIX:
            return None
        for info in read(path).tensors:
            found = _OF_A_LAYER.match(info.name)
            if found is None:
                around += info.bytes
            else:
                layers[int(found[1])] += info.bytes
                experts += info.bytes if _OF_EXPERTS in info.name else 0
    return WeightSizes(around, [layers[layer] for layer in sorted(layers)], experts) if layers else None


def streamed(shape: ModelShape, sizes: WeightSizes, room: int) -> ModelShape:
    """Return the shape of a model whose weights have ``room`` bytes of memory.

    In a mixture of experts, experts that do not fit stay on disk, if the memory holds all other weights and at least
    `BUFFERS` experts. Otherwise whole layers stay on disk. Raises ParlayError if there is too little memory for that.
    """
    mixed = shape.mixed
    if mixed is not None:
        each, count = sizes.experts / (mixed.layers * mixed.count), mixed.layers * mixed.count
        slots = int((room - sizes.around - sum(sizes.layers) + sizes.experts) / each)
        if BUFFERS <= slots < count:
            return replace(shape, mixed=replace(mixed, slots=slots))
    split = split_layers(sizes.layers, room - sizes.around)
    if split is None:
        least, whole = sizes.around + least_room(sizes.layers), sizes.around + sum(sizes.layers)
        raise ParlayError(
            f"{format_bytes(room)} of memory is too little for the weights: all need {format_bytes(whole)}, and at "
            f"least {format_bytes(least)} must be in memory: allow {least} bytes or more"
        )
    return replace(shape, split=split if split.streamed else None)


def measure_disk(model: str, clock: Callable[[], float] = time.perf_counter) -> tuple[float, Path]:
    """Measure the bytes per second of direct reads of a model's largest file of weights, and return it with the file.

    The measurement takes about a second at most. Raises ParlayError if the model has no files here.
    """
    path = max(_files_of(model), key=lambda file: file.stat().st_size, default=None)
    if path is None:
        raise ParlayError(f"no weights of {model} are here to measure the disk with: give --disk GB/S")
    descriptor, _ = open_past_cache(path)
    try:
        return _bandwidth(descriptor, clock), path
    finally:
        os.close(descriptor)


def _files_of(model: str) -> Sequence[Path]:
    from parlay.bench.plan.shapes import known_name

    return [] if known_name(model) else weight_files(model)


def _bandwidth(descriptor: int, clock: Callable[[], float]) -> float:
    piece, done, began = whole_blocks(_PIECE).numpy().data, 0, clock()
    while (count := os.preadv(descriptor, [piece], done)) > 0:
        done += count
        if clock() - began > _SECONDS or count < len(piece):
            break
    return done / max(clock() - began, 1e-9)
