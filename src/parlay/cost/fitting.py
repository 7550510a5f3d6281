"""From timed forwards to the constants of a `Machine`.

For given ratios of arithmetic to bandwidth each operator's maximum is decided, and a forward's time is linear in the
inverse of the bandwidths and in the seconds of starting. So the ratios are searched on a grid, of linear layers from
memory, from the cache, and of attention, and the rest is least squares without negative numbers, of relative errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from parlay.cost.roofline import ForwardShape, Machine, ModelShape, operators

Array = NDArray[np.float64]
Ratios = tuple[float, float, float]
"""FLOPs per byte at which arithmetic takes as long as memory: linear layers from memory, from the cache, attention."""

_FEWEST = 8
_RATIOS = tuple(4.0**power for power in range(-1, 6))
_REFINED = 14
_FREE = 1e-18
"""Seconds per byte of a kind of operator for which the fit found no cost: it counts as free."""


@dataclass(frozen=True, slots=True)
class TimedForward:
    """A forward, and the time that it took."""

    shape: ModelShape
    work: ForwardShape
    seconds: float


def fit(samples: Sequence[TimedForward], cache_bytes: float = 0.0) -> Machine:
    """The machine with that much cache which explains the samples best; the engine's seconds are not among them.

    Raises ValueError for too few samples.
    """
    if len(samples) < _FEWEST:
        raise ValueError(f"{len(samples)} timed forwards are too few to fit a machine: give at least {_FEWEST}")
    counted = _Counted.of(samples, cache_bytes)
    best = min((counted.solve(ratios) for ratios in itertools.product(_RATIOS, _RATIOS, _RATIOS)), key=_loss)
    spread = _RATIOS[1] / _RATIOS[0]
    for _ in range(_REFINED):
        spread **= 0.6
        factors = (1 / spread, 1.0, spread)
        steps = itertools.product(factors, factors, factors)
        best = min((counted.solve(_scaled(best.ratios, step)) for step in steps), key=_loss)
    return best.machine(cache_bytes)


def _scaled(ratios: Ratios, step: Ratios) -> Ratios:
    linear, cached, attention = (ratio * factor for ratio, factor in zip(ratios, step, strict=True))
    return linear, cached, attention


def relative_errors(machine: Machine, samples: Sequence[TimedForward]) -> list[float]:
    """|predicted / measured - 1| of each sample."""
    return [abs(machine.forward(sample.shape, sample.work) / sample.seconds - 1) for sample in samples]


def median_error(machine: Machine, samples: Sequence[TimedForward]) -> float:
    return median(relative_errors(machine, samples))


@dataclass(frozen=True, slots=True)
class _Solution:
    """Constants for given ratios: seconds per byte of the four kinds, then of layer, attention and forward."""

    ratios: Ratios
    seconds: Array
    loss: float

    def machine(self, cache_bytes: float) -> Machine:
        linear, cached, attention, vector = (max(float(each), _FREE) for each in self.seconds[:4])
        reached = [(1 / each, ratio / each) for each, ratio in zip((linear, cached), self.ratios[:2], strict=True)]
        if not self.seconds[1]:  # no sample fits into the cache: memory is taken to be as fast
            reached[1] = reached[0]
        elif not self.seconds[0]:
            reached[0] = reached[1]
        layer, attend, forward = (float(each) for each in self.seconds[4:])
        return Machine(
            bandwidth=reached[0][0],
            rate=reached[0][1],
            attention_bandwidth=1 / attention,
            attention_rate=self.ratios[2] / attention,
            vector_bandwidth=1 / vector,
            layer_seconds=layer,
            attend_seconds=attend,
            forward_seconds=forward,
            cached_bandwidth=reached[1][0],
            cached_rate=reached[1][1],
            cache_bytes=cache_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Counted:
    """The samples' operators, counted once: bytes and FLOPs ``[samples, operators]``, both over the sample's seconds.

    ``members[kind, operator]`` is 1 where an operator is of that kind; ``cached`` tells the samples whose weights fit
    into the cache, and ``starts`` ``[samples, 3]`` are layers, layers times paths, and 1, over seconds, too.
    """

    moved: Array
    flops: Array
    members: Mapping[str, Array]
    cached: Array
    starts: Array

    @staticmethod
    def of(samples: Sequence[TimedForward], cache_bytes: float) -> _Counted:
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
            starts=np.array(starts) / seconds,
        )

    def solve(self, ratios: Ratios) -> _Solution:
        """The best constants for these ratios."""
        linear, cached, attention = ratios
        columns = [
            self._busy("linear", linear) * (1 - self.cached),
            self._busy("linear", cached) * self.cached,
            self._busy("attention", attention),
            self._busy("vector", float("inf")),
        ]
        matrix = np.column_stack([*columns, self.starts])
        seconds = nonnegative(matrix, np.ones(len(matrix)))
        return _Solution(ratios, seconds, float(np.sum((matrix @ seconds - 1) ** 2)))

    def _busy(self, kind: str, ratio: float) -> Array:
        """Factor of the seconds per byte of a kind, for each sample."""
        return np.asarray(np.maximum(self.moved, self.flops / ratio) @ self.members[kind])


def _loss(one: _Solution) -> float:
    return one.loss


def nonnegative(matrix: Array, target: Array) -> Array:
    """Least squares without negative numbers, by active sets (Lawson and Hanson 1974)."""
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
    """The best solution over the free columns; those that would turn negative are held at 0, one after another."""
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
