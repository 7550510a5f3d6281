"""The machine and model on which `parlay plan` and `parlay simulate` base their predictions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.flags import add_option_flags
from parlay.cli.opening import named_model
from parlay.cost.devices import BANDWIDTH_SHARE, DEVICES, RATE_SHARE, find_device
from parlay.cost.devices import machine as known_machine
from parlay.models.fetch.pulled import DEFAULT_MODEL, named_or_default
from parlay.options import LoadOptions
from parlay.system.terminal import counted
from parlay.system.user_cache import check_makeable

if TYPE_CHECKING:
    from parlay.bench.plan.strategies import Models
    from parlay.bench.plan.weights import WeightType
    from parlay.cost.roofline import Machine, ModelShape

_BUSY = 0.5
"""Busy cores during a calibration above which its page warns."""
_LOOKS = 20
"""How often memory is timed; the fastest counts, as other programs here may take the cores for milliseconds."""


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the model, its weight format, and the machine."""
    parser.add_argument(
        "named",
        nargs="?",
        metavar="MODEL",
        help="name that parlay models lists, name of a common model such as llama-3.1-8b or qwen2.5-7b, Hugging Face "
        "Hub id, GGUF file, or local folder; config.json is enough "
        f"(default: {DEFAULT_MODEL}, fetched at the first use)",
    )
    parser.add_argument("--model", help="the same as MODEL")
    parser.add_argument(
        "--draft-model", metavar="MODEL", help="small model for strategies that draft with one, in its own number type"
    )
    parser.add_argument(
        "--dtype", default="auto", help="number type of the weights: auto, float32, bfloat16, float16 or int8"
    )
    parser.add_argument(
        "--quantize",
        metavar="TYPE",
        help="quantise the weights: int8, or a type of GGUF files, q8_0, q6_k, q5_k_m, q4_k_m, q4_0, iq4_xs, mxfp4; on "
        "a named device also awq, gptq, nf4, fp8, q3_k_m, q2_k (default: as the model's file has them)",
    )
    of_loading = {
        "kv_cache_dtype": "number type of cached keys and values; auto is the machine's own",
        "threads": "threads that decode on this machine",
    }
    add_option_flags(parser, LoadOptions, of_loading, help=of_loading)
    where = parser.add_argument_group("machine", "this machine, as calibrated, unless a device is named")
    where.add_argument(
        "--device",
        "--machine",
        metavar="NAME",
        help=f"predict for this device from its data sheet: {', '.join(DEVICES)}; short names such as h100, a100, 4090",
    )
    where.add_argument("--calibrate", action="store_true", help="measure this machine first; takes about a minute")
    where.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help="file of the calibration: read it, or measure and write it if it does not exist",
    )


@dataclass(frozen=True, slots=True)
class Ground:
    """The facts on which predictions are based.

    ``source`` says where the machine's constants come from. ``kv_bytes`` is the size of one number of a key or value,
    and ``memory`` the device's in bytes; None if unknown.
    """

    machine: Machine
    source: str
    weights: WeightType
    kv_bytes: float
    memory: int | None
    links: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Links between two processes here, as in `MachineCalibration`."""
    from_host: bool = False
    """Whether layers outside of memory come from the host's memory instead of disk."""


def check_flags(options: argparse.Namespace) -> None:
    """Raises for wrong flags before torch is imported and the machine is measured, which takes a minute."""
    from parlay.bench.plan.shapes import known_name
    from parlay.models.fetch.resolving import resolve_config

    if options.device and (options.calibrate or options.calibration):
        raise ValueError(
            "--device can't be used with --calibrate or --calibration, which are for this machine: remove one of them"
        )
    if options.device:
        find_device(options.device)
    if options.calibration and (options.calibrate or not options.calibration.exists()):
        check_makeable(options.calibration)
    options.model = named_or_default(named_model(options))
    for model in (options.model, options.draft_model):
        if model is not None and not known_name(model):
            resolve_config(model)


def models_of(options: argparse.Namespace, ground: Ground, *, experts: bool = False) -> Models:
    """The shapes of the model and its draft model: the one that is named, or the model's usual one.

    The draft model is not quantized with its target: it has its file's format, or plain numbers.

    Raises UnsupportedModel for a mixture of experts unless ``experts`` is set.
    """
    from parlay.bench.plan.shapes import CACHED_BYTES, read_model, shape_of, stores_twice
    from parlay.bench.plan.strategies import Models
    from parlay.cli.plan_heads import heads_of
    from parlay.models.fetch.resolving import BUILT_IN_DRAFTS

    draft = options.draft_model or BUILT_IN_DRAFTS.get(options.model)
    kv_bytes = CACHED_BYTES.get(options.kv_cache_dtype, ground.kv_bytes)

    def shape(model: str, weight_bytes: float) -> ModelShape:
        found = shape_of(read_model(model), weight_bytes=weight_bytes, kv_bytes=kv_bytes, experts=experts)
        return replace(found, stored_twice=stores_twice(model))

    drafting = None if draft is None else shape(draft, _draft_bytes(draft, ground))
    return Models(shape(options.model, ground.weights.bytes), drafting, heads_of(options.model))


def _draft_bytes(draft: str, ground: Ground) -> float:
    """Bytes per weight of a draft model; plain numbers have the type of computation, like keys and values."""
    stored = _stored_type(draft)
    return ground.kv_bytes if stored is None else stored.bytes


def _stored_type(model: str) -> WeightType | None:
    """The weight format of a GGUF file; None for plain numbers, and for other files."""
    from parlay.bench.plan.shapes import known_name
    from parlay.bench.plan.weights import stored_type
    from parlay.models.fetch.resolving import resolve_config

    found = None if known_name(model) else resolve_config(model)
    return stored_type(found) if found is not None and found.is_file() else None


def _weights(options: argparse.Namespace) -> WeightType | None:
    """The weight format from the flags, else the file's; None for plain numbers of any type."""
    from parlay.bench.plan.weights import weight_type

    named = options.quantize or (options.dtype if options.dtype != "auto" else None)
    if named is not None:
        return weight_type(named)
    return _stored_type(options.model)


def ground_of(options: argparse.Namespace) -> Ground:
    """The named device, or this machine, which is calibrated first if necessary."""
    return _table_device(options) if options.device else _this_machine(options)


def _table_device(options: argparse.Namespace) -> Ground:
    """A known device with its maker's figures. Keys and values take two bytes, unless weights take more."""
    from parlay.bench.plan.weights import weight_type

    weights = _weights(options) or weight_type("bfloat16")
    source = (
        f"device {options.device.lower()} by its maker's figures, taken to reach {BANDWIDTH_SHARE:.0%} of its "
        f"bandwidth and {RATE_SHARE:.0%} of its arithmetic, without CUDA graphs; nothing was measured"
    )
    memory = round(1e9 * find_device(options.device).memory)
    return Ground(known_machine(options.device, weights.name), source, weights, max(2, round(weights.bytes)), memory)


def _this_machine(options: argparse.Namespace) -> Ground:
    """The local machine with its calibration."""
    from parlay.bench.plan.machine import load_calibration
    from parlay.bench.plan.weights import weight_type

    path, weights = _calibration_file(options)
    calibration = load_calibration(path)
    origin = calibration.provenance
    kept = str(origin["weights"])
    if weights is not None and kept not in (weights.name, weights.blocks.name if weights.blocks else ""):
        raise ValueError(
            f"{path} was measured for {kept} weights, not {weights.name}: measure again with these, by "
            "parlay plan --calibrate"
        )
    source = (
        f"{origin['processor']}, {counted(int(origin['threads']), 'thread')}, calibrated {origin['date']} "
        f"(median error of the fit {calibration.median_error:.0%}) in {path}"
    )
    busy = float(origin.get("busy_cores", 0))
    if busy > _BUSY:
        source += f", while {busy:g} cores were busy with other work: --calibrate again when they are idle"
    memory = int(origin["memory_bytes"]) if "memory_bytes" in origin else None
    kept_weights, kv_bytes = weights or weight_type(kept), float(origin["kv_bytes"])
    return Ground(calibration.machine, source, kept_weights, kv_bytes, memory, calibration.links)


def at_present(ground: Ground, options: argparse.Namespace) -> Ground:
    """Return the ground while memory is as fast as it is now, if it is this machine with its own calibration."""
    then = ground.machine.read_bandwidth
    if options.device or options.calibration or not then:
        return ground
    from parlay.bench.plan.machine import memory_reader

    read = memory_reader("cpu")
    machine = ground.machine.at(max(read() for _ in range(_LOOKS)))
    source = f"{ground.source}, memory now at {machine.read_bandwidth / then:.2f} of its speed then"
    return replace(ground, machine=machine, source=source)


def _calibration_file(options: argparse.Namespace) -> tuple[Path, WeightType | None]:
    """The calibration file, made first if missing or asked for, and the requested weight format.

    None for the format means the one of the named calibration.
    """
    from parlay.bench.plan import machine
    from parlay.bench.plan.weights import weight_type

    weights = _weights(options)
    named: Path | None = options.calibration
    if named is not None and named.exists() and not options.calibrate:
        return named, weights
    if weights is not None:
        machine.check_here(weights)
    load = LoadOptions(
        dtype="auto" if weights is None or weights.blocks or weights.name == "int8" else weights.name,
        quantize="int8" if weights is not None and weights.name == "int8" else None,
        threads=options.threads,
    )
    load = machine.load_here(options.model, load)
    weights = weights or weight_type(load.dtype)
    kept = weights.blocks.name if weights.blocks else weights.name
    path = named or machine.calibration_path(kept)
    if options.calibrate or not path.is_file():
        if not options.calibrate:
            say(f"this machine is not calibrated for {kept} yet: measuring it, which takes about a minute")
        machine.calibrate_here(load, blocks=weights.blocks, log=say).save(path)
        say(f"calibration kept in {path}")
    return path, weights


def say(line: str) -> None:
    print(line, file=sys.stderr)
