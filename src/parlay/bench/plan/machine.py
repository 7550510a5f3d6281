"""Calibrates this machine with real runners over random weights, and finds and checks calibration files."""

from __future__ import annotations

import datetime
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from parlay import __version__, models
from parlay.bench.host import busy_cores
from parlay.bench.plan.overheads import engine_overheads
from parlay.bench.plan.shapes import config_of, read_model
from parlay.bench.plan.weights import Blocks, WeightType, weight_type
from parlay.cache import Budget
from parlay.cost.calibrate import SHAPES, WORKS, MachineCalibration, calibrate, load, no_reading, with_engine
from parlay.cost.roofline import ForwardShape, ModelShape
from parlay.models.compiled.reading import MemoryReader
from parlay.models.native import NativeRunner
from parlay.models.opening import chosen_device
from parlay.models.random_decoder import random_weights, save_decoder
from parlay.models.torch_ops.kernels import choose_dtype
from parlay.models.weights.stored import StoredTensor
from parlay.options import LoadOptions
from parlay.ranks.links import measure_links
from parlay.system import threads
from parlay.system.machine import cpu_model
from parlay.system.user_cache import user_cache
from parlay.types import ParlayError, Runner

_MIN_CONTEXT = 128
_COMPUTED_TYPES = ("float64", "float32", "bfloat16", "float16", "int8")
_REQUIRED_FIELDS = ("device", "processor", "threads", "date", "weights", "weight_bytes", "kv_bytes")
"""The provenance fields that a calibration must have."""
Log = Callable[[str], None]


def calibration_path(weights: str) -> Path:
    """Return the default path of this machine's calibration for weights of the type ``weights``."""
    name = re.sub(r"\W+", "-", weights)
    return user_cache() / f"calibration-{name}.json"


def load_here(model: str, asked: LoadOptions) -> LoadOptions:
    """Return options to load random weights whose forwards cost as much as the model's.

    They name the data type that `parlay.models.load` would choose for the model.
    """
    if asked.dtype != "auto":
        return asked
    dtype, _ = choose_dtype(read_model(model), models.default_device())
    return replace(asked, dtype=str(dtype).removeprefix("torch."))


def check_here(weights: WeightType) -> None:
    """Raise ValueError for a type of weights that Parlay can't compute with on this machine."""
    if weights.blocks is None and weights.name not in _COMPUTED_TYPES:
        raise ValueError(f"weights of type {weights.name} can't run here: choose another type, or give --device")


def open_random(
    shape: ModelShape, options: LoadOptions, *, max_context: int, cache_tokens: int, blocks: Blocks | None = None
) -> tuple[Runner, ModelShape]:
    """Open a runner with random weights. Returns it, and the shape with the bytes per number that it really has.

    The weights are saved as a checkpoint and loaded like any other. With ``blocks``, every matrix is in its block
    format instead. Kernels choose the data type of cached keys and values, so their bytes are computed from the memory
    that the cache takes.
    """
    budget = Budget(None)
    config = config_of(shape, max_context)
    if blocks is not None:
        threads.settle(options.threads)
        weights = random_weights(config, partial(blocks.of, layers=config.num_layers))
        runner: Runner = NativeRunner(
            config,
            weights,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            max_tokens_cached=cache_tokens,
            budget=budget,
            name=f"random {blocks.name}",
        )
        matrices = [weight for weight in weights.values() if isinstance(weight, StoredTensor)]
        weight_bytes = sum(each.data.nbytes for each in matrices) / sum(math.prod(each.shape) for each in matrices)
    else:
        with tempfile.TemporaryDirectory() as folder:
            save_decoder(config, Path(folder))
            runner = models.load(folder, options, cache_tokens=cache_tokens, budget=budget)
        weight_bytes = weight_type(options.quantize or runner.spec.dtype).bytes
    numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * runner.capacity()
    return runner, replace(shape, weight_bytes=weight_bytes, kv_bytes=budget.total // numbers)


def calibrate_here(
    options: LoadOptions,
    *,
    blocks: Blocks | None = None,
    shapes: Sequence[ModelShape] = (),
    works: Sequence[ForwardShape] = WORKS,
    log: Log = lambda line: None,
) -> MachineCalibration:
    """Time forwards of random decoders, and steps of the engine, on this machine. It takes about a minute on two cores.

    ``options`` say how the models are loaded; with ``blocks``, their weights are in these formats. ``log`` gets a line
    for each part of the work. If there is one thread on a processor, its processor time is measured, in which time for
    other programs does not count.
    """
    shapes = shapes or (SHAPES if blocks is None else tuple(map(_in_whole_blocks, SHAPES)))
    longest = max(_MIN_CONTEXT, *(work.context + work.rows for work in works))
    room = 2 * max(work.batch * (work.context + work.rows) for work in works) + 1024
    opened: list[Runner] = []

    def open_runner(shape: ModelShape) -> tuple[Runner, ModelShape]:
        log(f"timing forwards of {shape.parameters / 1e6:.0f} million parameters")
        opened[:] = []  # free the last runner's memory for the next one
        runner, kept = open_random(shape, options, max_context=longest, cache_tokens=room, blocks=blocks)
        opened.append(runner)
        name = blocks.name if blocks is not None else options.quantize or runner.spec.dtype
        provenance.update(_provenance(runner, kept), weights=name)
        return runner, kept

    provenance: dict[str, str | float] = {"busy_cores": round(busy_cores(), 1)}
    smallest_last = sorted(
        shapes, key=lambda shape: shape.parameters, reverse=True
    )  # the engine's steps are timed with the last model
    count = threads.count()
    clock = time.thread_time if count == 1 and options.device == "cpu" else time.perf_counter
    calibration = calibrate(
        open_runner,
        provenance,
        shapes=smallest_last,
        works=works,
        cache_bytes=cache_bytes(),
        threads=count,
        clock=clock,
        read=memory_reader(chosen_device(options.device).type),
    )
    log("timing steps of the engine")
    calibration = with_engine(calibration, engine_overheads(opened[-1], clock))
    if not str(provenance["device"]).startswith("cpu"):
        return calibration
    log("timing exchanges between two processes")
    try:
        return replace(calibration, links={name: asdict(link) for name, link in measure_links().items()})
    except ParlayError as error:  # the calibration is still useful without links
        log(str(error))
        return calibration


def memory_reader(device: str) -> Callable[[], float]:
    """Return a function that measures how many bytes per second all threads read from memory at present.

    It returns 0, for unknown, if the device is no CPU or there is no compiled library.
    """
    return MemoryReader().bandwidth if device == "cpu" else no_reading


def _in_whole_blocks(shape: ModelShape) -> ModelShape:
    """Return the shape with sizes rounded up to multiples of 256, so that matrices consist of whole blocks."""
    hidden, mlp = (-(-size // 256) * 256 for size in (shape.hidden_size, shape.intermediate_size))
    return replace(shape, hidden_size=hidden, intermediate_size=mlp, num_heads=hidden // shape.head_dim)


def cache_bytes(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> float:
    """Return the bytes of the processor's largest cache; 16 MiB if the system does not tell."""
    sizes = [path.read_text(encoding="utf-8").strip() for path in cpu.glob("index*/size")]
    kibibytes = [int(size[:-1]) for size in sizes if size.endswith("K") and size[:-1].isdecimal()]
    return float(max(kibibytes, default=16 << 10) << 10)


def load_calibration(path: Path) -> MachineCalibration:
    """Read a file that `calibrate_here` made. Raises ParlayError, in one line, for any other file."""
    calibration = load(path)
    missing = [name for name in _REQUIRED_FIELDS if name not in calibration.provenance]
    if missing:
        raise ParlayError(f"{path} lacks {', '.join(missing)}: make a new calibration with parlay plan --calibrate")
    return calibration


def _provenance(runner: Runner, kept: ModelShape) -> dict[str, str | float]:
    device = runner.spec.device
    return {
        "device": device,
        "processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_model(),
        "dtype": runner.spec.dtype,
        "weight_bytes": kept.weight_bytes,
        "kv_bytes": kept.kv_bytes,
        "memory_bytes": _memory_bytes(runner.spec.device),
        "threads": threads.count(),
        "kernels": runner.spec.kernels,
        "parlay": __version__,
        "torch": metadata.version("torch"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
    }


def _memory_bytes(device: str) -> int:
    """Return the whole memory of the device in bytes."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
