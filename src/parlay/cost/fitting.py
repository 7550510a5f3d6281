"""Fits the constants of a `Machine` to timed forwards.

Linear layers have two ratios of arithmetic rate to bandwidth: one if they read weights from memory, one if from the
cache. For given ratios, a forward's time is linear in the inverse bandwidths, the inverse rate of attention and the
start-up seconds. So the two ratios are searched on a grid, and non-negative least squares of the relative errors finds
the other constants.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from parlay.cost.roofline import ForwardShape, Machine, ModelShape, operators, uneven

Array = NDArray[np.float64]
Ratios = tuple[float, float]
"""FLOPs per byte at which arithmetic takes as long as reading: for weights in memory, and for weights in the cache."""

_MIN_SAMPLES = 8
_RATIOS = tuple(4.0**power for power in range(-1, 6))
_REFINEMENTS = 24
_MIN_COST = 1e-18
"""Seconds per byte, or per FLOP, of a kind of operator for which the fit found no cost."""


@dataclass(frozen=True, slots=True)
class TimedForward:
    """A forward ``work`` of a model of the shape ``shape``, and the seconds that it took.

    ``read_bandwidth``: bytes per second at which all threads read memory then; 0: unknown.
    """

    shape: ModelShape
    work: ForwardShape
    seconds: float
    read_bandwidth: float = 0.0


def fit(samples: Sequence[TimedForward], cache_bytes: float = 0.0, threads: int = 1) -> Machine:
    """Fit a machine whose cache has ``cache_bytes`` to the samples. The engine's overheads are not fitted.

    ``threads`` is the number of threads that share the KV heads in attention. The machine is that of the fastest memory
    among the samples. Raises ValueError for too few samples.
    """
    if len(samples) < _MIN_SAMPLES:
        raise ValueError(f"{len(samples)} timed forwards are too few to fit a machine: give at least {_MIN_SAMPLES}")
    counted = _Counted.of(samples, cache_bytes, threads)
    best = min((counted.solve(ratios) for ratios in itertools.product(_RATIOS, _RATIOS)), key=_loss)
    spread = _RATIOS[1] / _RATIOS[0]
    for _ in range(_REFINEMENTS):
        spread **= 0.75
        factors = (1 / spread, 1.0, spread)
        steps = [(best.ratios[0] * one, best.ratios[1] * other) for one in factors for other in factors]
        best = min(map(counted.solve, steps), key=_loss)
    machine = best.machine(cache_bytes, threads)
    return replace(machine, read_bandwidth=max(sample.read_bandwidth for sample in samples))


def relative_errors(machine: Machine, samples: Sequence[TimedForward]) -> list[float]:
    """Return abs(predicted / measured - 1) for the seconds of each sample."""
    predicted = [machine.at(sample.read_bandwidth).forward(sample.shape, sample.work) for sample in samples]
    return [abs(told / sample.seconds - 1) for told, sample in zip(predicted, samples, strict=True)]


def median_error(machine: Machine, samples: Sequence[TimedForward]) -> float:
    return median(relative_errors(machine, samples))


@dataclass(frozen=True, slots=True)
class _Solution:
    """The best constants for given ratios. ``loss`` is the sum of the squared relative errors.

    ``seconds`` has nine numbers: per byte of linear layers (0 from memory, 1 from the cache), per byte of attention (2
    from memory, 3 from the cache), per byte of other operators (4), per FLOP of attention (5), and to start a layer
    (6), a path's attention in a layer (7), and a forward (8).
    """

    ratios: Ratios
    seconds: Array
    loss: float

    def machine(self, cache_bytes: float, threads: int) -> Machine:
        linear, cached = self._from_both(0, 1)
        attention, cached_attention = self._from_both(2, 3)
        vector, product = (max(float(each), _MIN_COST) for each in self.seconds[4:6])
        layer, attend, forward = (float(each) for each in self.seconds[6:])
        return Machine(
            bandwidth=1 / linear,
            rate=self.ratios[0 if self.seconds[0] else 1] / linear,
            attention_bandwidth=1 / attention,
            attention_rate=1 / product,
            vector_bandwidth=1 / vector,
            layer_seconds=layer,
            attend_seconds=attend,
            forward_seconds=forward,
            cached_bandwidth=1 / cached,
            cached_rate=self.ratios[1 if self.seconds[1] else 0] / cached,
            cached_attention_bandwidth=1 / cached_attention,
            cache_bytes=cache_bytes,
            threads=threads,
        )

    def _from_both(self, memory: int, cache: int) -> tuple[float, float]:
        """Return the seconds per byte from memory and from the cache. A constant without samples equals the other."""
        found = [float(self.seconds[place]) for place in (memory, cache)]
        return max(found[0] or found[1], _MIN_COST), max(found[1] or found[0], _MIN_COST)


@dataclass(frozen=True, slots=True)
class _Counted:
    """The samples' operators: the bytes ``moved`` and the ``flops``, both ``[samples, operators]``.

    Both are divided by the sample's seconds, so that the fit minimizes relative errors. ``members[kind]``
    ``[operators]`` is 1 where an operator is of that kind. ``cached`` ``[samples]`` is 1 where the weights fit into the
    cache. ``slower`` ``[samples, 1]`` is how many times as long memory took to read as in the sample in which it was
    fastest. ``uneven`` ``[samples]`` is the factor by which attention takes longer because KV heads do not divide
    evenly among threads. ``starts`` ``[samples, 3]`` are layers, layers times paths, and 1, also divided by seconds.
    """

    moved: Array
    flops: Array
    members: Mapping[str, Array]
    cached: Array
    slower: Array
    uneven: Array
    starts: Array

    @staticmethod
    def of(samples: Sequence[TimedForward], cache_bytes: float, threads: int) -> _Counted:
        listed = [list(operators(sample.shape, sample.work)) for sample in samples]
        seconds = np.array([[sample.seconds] for sample in samples])
        starts = [
            [sample.shape.num_layers, sample.shape.num_layers * sample.work.batch * sample.work.leaves, 1]
            for sample in samples
        ]
        return _Counted(
            moved=np.array([[operator.bytes for operator in each] for each in listed]) / seconds,
            flops=np.array([[operator.flops for operator in each] for each in listed]) / seconds,
            members={
                kind: np.array([float(operator.kind == kind) for operator in listed[0]])
                for kind in ("linear", "attention", "vector")
            },
            cached=np.array([float(sample.shape.read_bytes <= cache_bytes) for sample in samples]),
            slower=_slower(samples)[:, None],
            uneven=np.array([uneven(sample.shape, sample.work.sums.sequences, threads) for sample in samples]),
            starts=np.array(starts) / seconds,
        )

    def solve(self, ratios: Ratios) -> _Solution:
        """Return the best constants for these ratios."""
        read = self.uneven * (self.moved @ self.members["attention"])
        columns = [
            self._linear(self.slower * self.moved, ratios[0]) * (1 - self.cached),
            self._linear(self.moved, ratios[1]) * self.cached,
            read * (1 - self.cached),
            read * self.cached,
            self.moved @ self.members["vector"],
            self.uneven * (self.flops @ self.members["attention"]),
        ]
        matrix = np.column_stack([*columns, self.starts])
        seconds = nonnegative(matrix, np.ones(len(matrix)))
        return _Solution(ratios, seconds, float(np.sum((matrix @ seconds - 1) ** 2)))

    def _linear(self, moved: Array, ratio: float) -> Array:
        """Return, for each sample, the number that the seconds per byte of linear layers are multiplied by.

        It is the sum over linear operators of (bytes^3 + (FLOPs / ratio)^3)^(1/3), as in `roofline.together`.
        """
        return np.asarray(np.cbrt(moved**3 + (self.flops / ratio) ** 3) @ self.members["linear"])


def _slower(samples: Sequence[TimedForward]) -> Array:
    """Return how many times slower than in the fastest sample memory was read; 1 where that is unknown."""
    read = np.array([sample.read_bandwidth for sample in samples])
    return np.where(read > 0, read.max() / np.where(read > 0, read, 1.0), 1.0)


def _loss(one: _Solution) -> float:
    return one.loss


def nonnegative(matrix: Array, target: Array) -> Array:
    """Solve min |matrix x - target| over x >= 0 by active sets (Lawson and Hanson 1974)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    solution, free = np.zeros(len(scale)), np.zeros(len(scale), dtype=bool)
    for _ in range(3 * len(scale)):
        slope = np.where(free, -np.inf, scaled.T @ (target - scaled @ solution))
        if slope.max() <= 1e-12:
            break
        free[slope.argmax()] = True
        solution = _within(scaled, target, solution, free)
    return np.asarray(solution / scale)


def _within(matrix: Array, target: Array, solution: Array, free: NDArray[np.bool_]) -> Array:
    """Return the best solution whose numbers are positive in the free columns and 0 in the others.

    Columns whose numbers would turn negative are fixed at 0, one after another.
    """
    while True:
        wanted = np.zeros_like(solution)
        wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        negative = free & (wanted <= 0)
        if not negative.any():
            return wanted
        step = np.min(solution[negative] / (solution[negative] - wanted[negative]))
        solution = solution + step * (wanted - solution)
        free &= solution > 1e-15
        solution[~free] = 0.0
