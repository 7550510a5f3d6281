"""A straight line through points whose x is taken by its logarithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """y = start + slope log2(x), and the share of the variance of y that it explains."""

    start: float
    slope: float
    r_squared: float

    def at(self, x: float) -> float:
        return self.start + self.slope * math.log2(x)

    def words(self, name: str) -> str:
        sign = "-" if self.slope < 0 else "+"
        return f"{self.start:.1f} {sign} {abs(self.slope):.1f} log2({name}), R² = {self.r_squared:.2f}"


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """Least squares; None for fewer than three points or where all x are equal."""
    xs = [math.log2(x) for x, _ in points]
    ys = [y for _, y in points]
    count = len(points)
    if count < 3:
        return None
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    start = mean_y - slope * mean_x
    variance = sum((y - mean_y) ** 2 for y in ys)
    missed = sum((y - start - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return Line(start, slope, 1 - missed / variance if variance else 1.0)
