"""`parlay serve --devices auto`: chooses the number of processes from the machine's calibration."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parlay.cli.serve_replicas import of_one_process
from parlay.cost.roofline import Machine, ModelShape
from parlay.options import UsageError
from parlay.simulate.costs import RooflineSteps, StepCost
from parlay.simulate.splits import Link, Split, SplitSteps, memory_of, share_of, splits

_AT_ONCE = 16
"""Concurrent requests of the comparison, and the tokens of context of each:"""
_CONTEXT = 1024
_GAIN = 0.95
"""Several processes must take less than this share of one process's time, as they need more memory, and each drafter
learns from fewer requests."""


def add_devices_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        choices=("auto",),
        help="auto: choose --replicas and --tensor-parallel for this machine by its calibration, which is made where "
        "there is none, and say why",
    )


def choose_processes(options: argparse.Namespace, models: Sequence[str]) -> None:
    """Set the flags for the best number of processes, and print why. Raises UsageError for flags that contradict it."""
    ranks = options.tensor_parallel * options.pipeline_parallel * options.context_parallel
    if options.replicas > 1 or ranks > 1 or options.drafter_only:
        raise UsageError("--devices auto sets the number of replicas and ranks itself: remove the flags that set them")
    if flags := of_one_process(options):
        raise UsageError(
            f"--devices auto can't be used with {flags[0]}, which works only in one process: remove one of them"
        )
    if len(models) > 1:
        raise UsageError(f"--devices auto works with one model, got {len(models)}: name one")
    import torch

    if torch.cuda.is_available():
        raise UsageError("--devices auto works only on machines without a GPU: remove it")
    best, line = _choice(options, models[0])
    options.replicas, options.tensor_parallel = best.replicas, best.tensor
    print(f"--devices auto: {line}", file=sys.stderr)


def _choice(options: argparse.Namespace, model: str) -> tuple[Split, str]:
    from parlay.bench.plan.strategies import Models
    from parlay.cache import MemoryBounds
    from parlay.cli import parser_of
    from parlay.cli.plan_devices import measured_link
    from parlay.cli.plan_machine import check_flags, ground_of, models_of
    from parlay.system import threads

    count = options.threads or threads.usual()
    if count < 2:
        return Split(), "one process, for there is one thread"
    words = ["--model", model, "--threads", str(count), "--dtype", options.dtype]
    words += ["--kv-cache-dtype", options.kv_cache_dtype]
    words += ["--quantize", options.quantize] if options.quantize else []
    plan_options = parser_of("plan").parse(words)
    check_flags(plan_options)
    ground = ground_of(plan_options)
    if measured_link(ground) is None:  # older calibrations have no links
        plan_options = parser_of("plan").parse([*words, "--calibrate"])
        ground = ground_of(plan_options)
    link = measured_link(ground)
    if link is None:
        raise UsageError(
            "--devices auto can't measure the link between two processes here: use --replicas or "
            "--tensor-parallel instead"
        )
    models: Models = models_of(plan_options, ground)
    memory = MemoryBounds.parse(options.memory).requests or ground.memory
    ways = compare(models.target, ground.machine, memory, link, count)
    return chosen(ways)


@dataclass(frozen=True, slots=True)
class Way:
    """A split, and the seconds of its step over all requests; None if it does not fit into memory."""

    split: Split
    seconds: float | None


def compare(shape: ModelShape, machine: Machine, memory: float | None, link: Link, threads: int) -> Sequence[Way]:
    """Compare one process on the whole machine with splits into at most as many processes as there are threads."""
    return [Way(Split(), _of_all(RooflineSteps(machine, shape), 1)), *_several(shape, machine, memory, link, threads)]


def _several(shape: ModelShape, machine: Machine, memory: float | None, link: Link, threads: int) -> Iterator[Way]:
    from parlay.bench.plan.report import USABLE

    for count in sorted({2, *(size for size in (4, 8, 16, 32, 64) if size <= threads)}):
        part, usable = share_of(machine, count), None if memory is None else USABLE * memory / count
        for split in splits(count, shape):
            if split.devices == count and split.context == split.pipeline == 1:
                room = memory_of(shape, split, usable, None).cache_tokens
                fits = room * split.replicas >= _AT_ONCE * _CONTEXT
                yield Way(split, _of_all(SplitSteps(part, shape, split, link), split.replicas) if fits else None)


def _of_all(cost: StepCost, replicas: int) -> float:
    """Seconds in which each request gets one token."""
    each = math.ceil(_AT_ONCE / replicas)
    return cost(each, each, each, each * _CONTEXT, each * _CONTEXT)


def chosen(ways: Sequence[Way]) -> tuple[Split, str]:
    """The fastest way, and the reason in one line."""
    alone, *others = ways
    assert alone.seconds is not None
    quick = sorted((way for way in others if way.seconds is not None), key=lambda way: way.seconds or 0.0)
    what = f"a step of {_AT_ONCE} requests is predicted to take"
    if not quick:
        return alone.split, "one process, for several don't fit into memory"
    best = quick[0]
    assert best.seconds is not None
    mine, theirs = 1e3 * alone.seconds, 1e3 * best.seconds
    if best.seconds > _GAIN * alone.seconds:
        return alone.split, f"one process: {what} {mine:.1f} ms in it, and {theirs:.1f} in {_named(best.split)}"
    return best.split, f"{_named(best.split)}: {what} {theirs:.1f} ms in them, and {mine:.1f} in one process"


def _named(split: Split) -> str:
    if split.devices == split.replicas:
        return f"{split.replicas} replicas"
    return f"{split.devices} processes ({split})"
