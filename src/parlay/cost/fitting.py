"""From timed forwards to the constants of a `Machine`.

For a given ratio of arithmetic to bandwidth each operator's maximum is decided, and a forward's time is linear in the
inverse of the bandwidths and in the seconds of starting. So the ratios are searched on a grid, of linear layers and of
attention, and the rest is least squares without negative numbers, of relative errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from parlay.cost.roofline import Machine, Shape, Work, operators

Array = NDArray[np.float64]

_FEWEST = 8
_RATIOS = tuple(2.0**power for power in range(-2, 11))
"""FLOPs per byte at which a machine's arithmetic and its memory are equally busy."""
_REFINED, _ZOOM = 12, 0.5
_NEVER = 1e-18
"""Seconds per byte where nothing was left to explain: that part is taken to be free."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A forward that was timed."""

    shape: Shape
    work: Work
    seconds: float


def fit(samples: Sequence[Sample]) -> Machine:
    """The machine that explains the samples best. The engine's own seconds are not among what it finds.

    Raises ValueError for too few samples.
    """
    if len(samples) < _FEWEST:
        raise ValueError(f"{len(samples)} timed forwards are too few to fit a machine: give at least {_FEWEST}")
    best = min((_Try.of(samples, linear, attention) for linear in _RATIOS for attention in _RATIOS), key=_loss)
    spread = _RATIOS[1] / _RATIOS[0]
    for _ in range(_REFINED):
        spread **= _ZOOM
        best = min(_around(samples, best, spread), key=_loss)
    return best.machine()


def relative_errors(machine: Machine, samples: Sequence[Sample]) -> list[float]:
    """|predicted / measured - 1| of each sample."""
    return [abs(machine.forward(sample.shape, sample.work) / sample.seconds - 1) for sample in samples]


def median_error(machine: Machine, samples: Sequence[Sample]) -> float:
    return median(relative_errors(machine, samples))


@dataclass(frozen=True, slots=True)
class _Try:
    """Constants for one pair of ratios: seconds per byte of the three kinds, then of layer, attention and forward."""

    linear: float
    attention: float
    seconds: Array
    loss: float

    @staticmethod
    def of(samples: Sequence[Sample], linear: float, attention: float) -> _Try:
        matrix = np.array([_row(sample, linear, attention) for sample in samples])
        seconds = nonnegative(matrix, np.ones(len(samples)))
        return _Try(linear, attention, seconds, float(np.sum((matrix @ seconds - 1) ** 2)))

    def machine(self) -> Machine:
        linear, attention, vector = (max(float(each), _NEVER) for each in self.seconds[:3])
        layer, attend, forward = (float(each) for each in self.seconds[3:])
        return Machine(
            bandwidth=1 / linear,
            rate=self.linear / linear,
            attention_bandwidth=1 / attention,
            attention_rate=self.attention / attention,
            vector_bandwidth=1 / vector,
            layer_seconds=layer,
            attend_seconds=attend,
            forward_seconds=forward,
        )


def _loss(one: _Try) -> float:
    return one.loss


def _around(samples: Sequence[Sample], best: _Try, spread: float) -> Iterable[_Try]:
    """The best try and its neighbours."""
    yield best
    for linear in (best.linear / spread, best.linear, best.linear * spread):
        for attention in (best.attention / spread, best.attention, best.attention * spread):
            yield _Try.of(samples, linear, attention)


def _row(sample: Sample, linear: float, attention: float) -> list[float]:
    """What the unknown seconds are multiplied by, over the sample's own seconds."""
    shape, work = sample.shape, sample.work
    ratios = {"linear": linear, "attention": attention, "vector": float("inf")}
    busy = dict.fromkeys(ratios, 0.0)
    for operator in operators(shape, work):
        busy[operator.kind] += max(operator.bytes, operator.flops / ratios[operator.kind])
    starts = [shape.num_layers, shape.num_layers * work.batch * work.leaves, 1]
    return [number / sample.seconds for number in (*busy.values(), *starts)]


def nonnegative(matrix: Array, target: Array) -> Array:
    """Least squares without negative numbers, by active sets (Lawson and Hanson 1974)."""
    scale = np.linalg.norm(matrix, axis=0)
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
