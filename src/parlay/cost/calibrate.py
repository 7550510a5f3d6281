"""Calibrates a machine: times forwards of real runners, fits a `Machine` to the times, and saves it as a JSON file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from parlay.cost.fitting import TimedForward, fit, median_error
from parlay.cost.overheads import Overheads
from parlay.cost.roofline import ForwardShape, Machine, ModelShape
from parlay.cost.timing import chain_of, time_forward, with_context
from parlay.types import ParlayError, Runner

FORMAT = 3
"""Version of the file's format. A file with another version is refused."""

Provenance = Mapping[str, str | float]

SHAPES = (
    ModelShape(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_layers=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        tie_embeddings=True,
    ),
    ModelShape(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        tie_embeddings=True,
    ),
    ModelShape(
        vocab_size=16384,
        hidden_size=1536,
        intermediate_size=6144,
        num_layers=4,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        tie_embeddings=True,
    ),
)
"""Models of 10, 4 and 151 million parameters. The small ones show the cost of starting a forward and a layer. The large
one shows the rest: it is as wide as usual models, and even in four bits its weights are too many for most caches."""

WORKS = (
    *(
        ForwardShape(batch=batch, rows=rows, context=context)
        for context in (256, 2048)
        for batch in (1, 4)
        for rows in (1, 4, 16)
    ),
    *(ForwardShape(rows=rows, context=4096) for rows in (1, 16)),  # longer than caches
)
"""The forwards that are timed with each model."""

_NUMBERS = ("weight_bytes", "kv_bytes", "memory_bytes", "busy_cores")
"""Provenance fields that are numbers. The others are strings or numbers."""
_ROUNDS, _SECONDS = 12, 6.0
"""Passes over the forwards of one context and batch, and seconds after which no further pass begins."""


class TimedWork(NamedTuple):
    """The shortest seconds of a forward ``work``, and the bytes per second at which memory was read in this pass; 0 if
    that was not measured."""

    work: ForwardShape
    seconds: float
    read_bandwidth: float


def no_reading() -> float:
    """Return 0: how fast memory is read is unknown."""
    return 0.0


@dataclass(frozen=True, slots=True)
class MachineCalibration:
    """The constants of a machine, the timed forwards that they were fitted to, and how these were measured."""

    machine: Machine
    provenance: Provenance
    samples: tuple[TimedForward, ...]
    links: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Links between two processes, by kind: ``bandwidth`` in bytes per second, ``latency`` in seconds. Empty if they
    were not measured."""

    @property
    def median_error(self) -> float:
        """Median relative error of the fitted machine's times over its own samples."""
        return median_error(self.machine, self.samples)

    def save(self, path: Path) -> None:
        """Write the calibration to a file, and create its folder if there is none."""
        content = {
            "format": FORMAT,
            "provenance": dict(self.provenance),
            "machine": asdict(self.machine),
            "median_error": round(self.median_error, 4),
            "links": {name: dict(link) for name, link in self.links.items()},
            "samples": [asdict(sample) for sample in self.samples],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> MachineCalibration:
    """Read a file that `MachineCalibration.save` wrote. Raises ParlayError, in one line, for any other file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ParlayError(f"{path} has format {content['format']} and not {FORMAT}: run parlay plan --calibrate")
        machine, samples = _machine(content["machine"]), tuple(map(_sample, content["samples"]))
        links = {name: _link(link) for name, link in content.get("links", {}).items()}
        found = MachineCalibration(machine, _provenance(content["provenance"]), samples, links)
        if not found.median_error < math.inf:  # also refuses NaN
            raise ValueError("the times of this machine are not finite")
        return found
    except OSError as error:
        raise ParlayError(f"can't read the calibration {path}: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
        raise ParlayError(f"{path} is not a calibration: make one with parlay plan --calibrate") from None


def _provenance(fields: Mapping[str, Any]) -> Provenance:
    """Check the provenance fields. Raises ValueError for a value of the wrong type."""
    for name, value in fields.items():
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not (is_number or (isinstance(value, str) and name not in _NUMBERS)):
            raise ValueError(f"{name} can't be {value!r}")
    return fields


def _machine(fields: Mapping[str, Any]) -> Machine:
    engine = Overheads(**{name: _at_least_0(value) for name, value in fields["engine"].items()})
    machine = Machine(**{name: _at_least_0(value) for name, value in fields.items() if name != "engine"}, engine=engine)
    speeds = [machine.bandwidth, machine.rate, machine.vector_bandwidth]
    speeds += [machine.attention_bandwidth, machine.attention_rate, machine.threads]
    speeds += [machine.cached_bandwidth, machine.cached_rate] if machine.cache_bytes else []
    if min(speeds) < 1:
        raise ValueError("a machine without speed")
    return machine


def _at_least_0(value: Any) -> float:
    """Convert to a float. Raises ValueError unless it is finite and at least 0."""
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{value!r} is not a number of at least 0")
    return float(value)


def _link(fields: Mapping[str, Any]) -> Mapping[str, float]:
    return {name: float(fields[name]) for name in ("bandwidth", "latency")}


def _sample(fields: Mapping[str, Any]) -> TimedForward:
    read = _at_least_0(fields.get("read_bandwidth", 0.0))
    return TimedForward(ModelShape(**fields["shape"]), ForwardShape(**fields["work"]), fields["seconds"], read)


def calibrate(
    open_runner: Callable[[ModelShape], tuple[Runner, ModelShape]],
    provenance: Provenance,
    *,
    shapes: Sequence[ModelShape] = SHAPES,
    works: Sequence[ForwardShape] = WORKS,
    cache_bytes: float = 0.0,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    read: Callable[[], float] = no_reading,
) -> MachineCalibration:
    """Time the forwards ``works`` on a runner of each shape, and fit a machine whose cache has ``cache_bytes`` to them.

    ``open_runner`` makes a runner with room for all of ``works``. It also returns the shape with the sizes in bytes
    that the runner really has. ``threads`` is the number of threads that share the KV heads in attention. ``clock``
    returns seconds. ``read`` measures the bytes per second at which all threads read memory at present; it is called
    before each pass over forwards of a shape whose weights do not fit into the cache.
    """
    samples: list[TimedForward] = []
    for wanted in shapes:
        runner, shape = open_runner(wanted)
        timed = measure(runner, works, clock=clock, read=no_reading if shape.read_bytes <= cache_bytes else read)
        samples += [TimedForward(shape, *each) for each in timed]
    return MachineCalibration(fit(samples, cache_bytes, threads), provenance, tuple(samples))


def with_engine(calibration: MachineCalibration, engine: Overheads) -> MachineCalibration:
    """Return the calibration with ``engine``, the seconds that the engine takes in a step besides its forwards."""
    return replace(calibration, machine=replace(calibration.machine, engine=engine))


def measure(
    runner: Runner,
    works: Sequence[ForwardShape],
    *,
    rounds: int = _ROUNDS,
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    read: Callable[[], float] = no_reading,
) -> Iterator[TimedWork]:
    """Yield each of ``works`` with the shortest measured time of its forward, and memory's bandwidth by ``read`` then.

    The shortest time is the best estimate because delays can only make a forward slower. The rows of each sequence are
    a root and a chain below it, and all of them get logits. The works of one context and batch take turns, so that a
    slow moment affects all of them. No further turn begins after ``rounds`` rounds or ``seconds`` of ``clock``.
    """
    for context in sorted({work.context for work in works}):
        most = max(work.rows for work in works if work.context == context)
        for batch in sorted({work.batch for work in works if work.context == context}):
            group = [work for work in works if (work.context, work.batch) == (context, batch)]
            with ExitStack() as texts:
                for sequence in range(batch):
                    fits = texts.enter_context(with_context(runner, sequence, context, most))
                    _check_room(runner, context + most, fits=fits)
                yield from _take_turns(runner, group, rounds, seconds, clock=clock, read=read)


def _check_room(runner: Runner, tokens: int, *, fits: bool) -> None:
    if not fits:
        raise ParlayError(f"{runner.spec.name} has no room for {tokens} tokens: free memory, or calibrate with less")


def _take_turns(
    runner: Runner,
    works: Sequence[ForwardShape],
    rounds: int,
    seconds: float,
    *,
    clock: Callable[[], float],
    read: Callable[[], float],
) -> Iterator[TimedWork]:
    until = clock() + seconds
    best = {work: TimedWork(work, math.inf, 0.0) for work in works}
    for each_pass in range(rounds + 1):
        if each_pass > 1 and clock() > until:
            break
        read_bandwidth = read()
        for turn, work in enumerate((works[0], *works)):
            segments = [chain_of(runner, sequence, work.rows) for sequence in range(work.batch)]
            timed = TimedWork(work, time_forward(runner, segments, clock), read_bandwidth)
            counts = each_pass and turn  # the first pass may build kernels, and reading has emptied the caches
            if counts and timed.seconds < best[work].seconds:
                best[work] = timed
    yield from best.values()
