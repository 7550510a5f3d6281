"""Shapes of checkpoints for the cost model, and the calibration of this machine through real runners."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

from parlay import __version__, models
from parlay.bench.plan.overheads import engine_overheads
from parlay.cache import Budget
from parlay.cost.calibrate import SHAPES, WORKS, Calibration, calibrate, load, with_engine
from parlay.cost.roofline import ForwardShape, ModelShape
from parlay.models.config import DecoderConfig
from parlay.models.fetch.resolving import resolve_config
from parlay.models.fused import stored_as
from parlay.models.loading import load_weights, read_config
from parlay.models.random_decoder import save_decoder
from parlay.models.torch_ops.kernels import choose_dtype
from parlay.options import LoadOptions
from parlay.system import threads
from parlay.system.cpu_info import cpu_model
from parlay.system.user_cache import user_cache
from parlay.types import ParlayError, Runner

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_LEAST_CONTEXT = 128
_TOLD = ("device", "processor", "threads", "date", "weights", "weight_bytes", "kv_bytes")
"""Facts about its origin that a calibration must hold."""
Log = Callable[[str], None]


def calibration_path(weights: str) -> Path:
    """Where this machine's calibration for ``weights`` of that type is kept unless told otherwise."""
    return user_cache() / f"calibration-{weights}.json"


def bytes_of(weights: str) -> int:
    """Bytes of one weight of that type. Raises ValueError for an unknown type."""
    if weights not in _BYTES:
        raise ValueError(f"dtype {weights!r} is not known: use one of {', '.join(_BYTES)}")
    return _BYTES[weights]


def read_model(model: str) -> DecoderConfig:
    """The decoder that a built-in name, a folder or a Hub id stands for; of a folder only config.json is needed.

    Raises ParlayError (UnsupportedModel) for what the native decoder does not run.
    """
    return read_config(resolve_config(model))


def in_blocks(model: str) -> bool:
    """Whether its file stores weights in blocks of few bits, which are multiplied as they are."""
    found = resolve_config(model)
    return found.is_file() and bool(stored_as(load_weights(found, read_config(found))))


def load_here(model: str, asked: LoadOptions) -> LoadOptions:
    """How random weights are loaded whose forwards cost what the model's do, as `parlay.models.load` loads it.

    Eight bits stand for weights in blocks of a file.
    """
    if asked.dtype != "auto":
        return asked
    if not asked.quantize and in_blocks(model):
        return replace(asked, dtype="bfloat16", quantize="int8")
    dtype, _ = choose_dtype(read_model(model), models.default_device())
    return replace(asked, dtype=str(dtype).removeprefix("torch."))


def shape_of(config: DecoderConfig, *, weight_bytes: int, kv_bytes: int) -> ModelShape:
    """A decoder's sizes for the cost model, with the bytes of a weight and of a number of a key or value."""
    return ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        tie_embeddings=config.tie_embeddings,
    )


def config_of(shape: ModelShape, max_context: int) -> DecoderConfig:
    """A plain Llama of that shape."""
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-6,
        max_context=max_context,
        tie_embeddings=shape.tie_embeddings,
    )


def open_random(
    shape: ModelShape, options: LoadOptions, *, max_context: int, cache_tokens: int
) -> tuple[Runner, ModelShape]:
    """A runner over random weights, loaded as any checkpoint is, and the shape in the bytes that it keeps.

    Kernels choose in which type keys and values are cached, so that is read off the memory that the cache takes.
    """
    budget = Budget(None)
    with tempfile.TemporaryDirectory() as folder:
        save_decoder(config_of(shape, max_context), Path(folder))
        runner = models.load(folder, options, cache_tokens=cache_tokens, budget=budget)
    numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * runner.capacity()
    weight_bytes = bytes_of(options.quantize or runner.spec.dtype)
    return runner, replace(shape, weight_bytes=weight_bytes, kv_bytes=budget.total // numbers)


def calibrate_here(
    options: LoadOptions,
    *,
    shapes: Sequence[ModelShape] = SHAPES,
    works: Sequence[ForwardShape] = WORKS,
    log: Log = lambda line: None,
) -> Calibration:
    """Time forwards of random decoders, and steps of the engine, on this machine; about a minute on two cores.

    ``options`` say how they are loaded. ``log`` gets a line for each part of the work.
    """
    longest = max(_LEAST_CONTEXT, *(work.context + work.rows for work in works))
    room = 2 * max(work.batch * (work.context + work.rows) for work in works) + 1024
    opened: list[Runner] = []

    def open_runner(shape: ModelShape) -> tuple[Runner, ModelShape]:
        log(f"timing forwards of {shape.parameters / 1e6:.0f} million parameters")
        opened[:] = []  # free the last runner's memory for the next one
        runner, kept = open_random(shape, options, max_context=longest, cache_tokens=room)
        opened.append(runner)
        provenance.update(_provenance(runner, kept), weights=options.quantize or runner.spec.dtype)
        return runner, kept

    provenance: dict[str, str | int] = {}
    smallest_last = sorted(
        shapes, key=lambda shape: shape.parameters, reverse=True
    )  # the engine's steps are timed with the last one
    calibration = calibrate(open_runner, provenance, shapes=smallest_last, works=works, cache_bytes=cache_bytes())
    log("timing steps of the engine")
    return with_engine(calibration, engine_overheads(opened[-1]))


def cache_bytes(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> float:
    """Bytes of the processor's largest cache; 16 MiB if the system does not say."""
    sizes = [path.read_text(encoding="utf-8").strip() for path in cpu.glob("index*/size")]
    kibibytes = [int(size[:-1]) for size in sizes if size.endswith("K") and size[:-1].isdecimal()]
    return float(max(kibibytes, default=16 << 10) << 10)


def load_calibration(path: Path) -> Calibration:
    """A file that `calibrate_here` made. Raises ParlayError with one line for anything else."""
    calibration = load(path)
    missing = [name for name in _TOLD if name not in calibration.provenance]
    if missing:
        raise ParlayError(f"{path} does not say {', '.join(missing)}: make a calibration with parlay plan --calibrate")
    return calibration


def _provenance(runner: Runner, kept: ModelShape) -> dict[str, str | int]:
    return {
        "device": runner.spec.device,
        "processor": _processor(runner.spec.device),
        "dtype": runner.spec.dtype,
        "weight_bytes": kept.weight_bytes,
        "kv_bytes": kept.kv_bytes,
        "threads": threads.count(),
        "kernels": runner.spec.kernels,
        "parlay": __version__,
        "torch": metadata.version("torch"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
    }


def _processor(device: str) -> str:
    """The processor's own name."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_model()
