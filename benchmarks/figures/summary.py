"""From rows to numbers: tokens per second of a workload, and ratios of systems that ran side by side."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.figures.results import Row


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median over rounds, and the lowest and highest round."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}-{self.high:.2f})"


def timed(rows: Iterable[Row]) -> list[Row]:
    """Rows that hold a measurement."""
    return [row for row in rows if row.decode_seconds > 0]


def rate(rows: Iterable[Row]) -> float:
    """Decoded tokens per second over all rows together."""
    chosen = timed(rows)
    seconds = sum(row.decode_seconds for row in chosen)
    return sum(row.decode_tokens for row in chosen) / seconds if seconds else 0.0


def ratio(rows: Sequence[Row], system: str, base: str) -> Ratio | None:
    """How many times as fast as ``base`` the system is, from rounds in which both ran; None without one."""
    by_round: dict[int, list[Row]] = defaultdict(list)
    for row in timed(rows):
        by_round[row.round].append(row)
    ratios = []
    for members in by_round.values():
        ours, theirs = (rate(row for row in members if row.system == name) for name in (system, base))
        if ours and theirs:
            ratios.append(ours / theirs)
    return spread(ratios)


def spread(values: Sequence[float]) -> Ratio | None:
    """Median and range; None of nothing."""
    return Ratio(median(values), min(values), max(values)) if values else None


def geometric(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def geometric_ratio(rows: Sequence[Row], system: str, base: str) -> Ratio | None:
    """Geometric mean over the kinds of text, for each round; then as `ratio`."""
    values = []
    for turn in sorted({row.round for row in rows}):
        own = [row for row in rows if row.round == turn]
        ratios = [ratio([row for row in own if row.kind == kind], system, base) for kind in kinds(own)]
        if ratios and all(ratios):
            values.append(geometric([one.middle for one in ratios if one is not None]))
    return spread(values)


def same(rows: Iterable[Row]) -> str:
    """How many of the texts equal those of plain decoding."""
    told = [row.same for row in rows if row.same is not None]
    return f"{sum(told)}/{len(told)}"


def tokens_per_step(rows: Iterable[Row]) -> float:
    """Committed tokens over steps; 0 where steps are not known."""
    chosen = [row for row in timed(rows) if row.steps]
    steps = sum(row.steps for row in chosen)
    return sum(row.tokens for row in chosen) / steps if steps else 0.0


def mean_looped(rows: Iterable[Row]) -> float:
    """Mean share of the whole, uncut plain text that repeats itself."""
    shares = [row.looped for row in rows if row.looped is not None]
    return sum(shares) / len(shares) if shares else 0.0


def kinds(rows: Iterable[Row]) -> list[str]:
    """The kinds of text that were timed, in order of appearance."""
    return list(dict.fromkeys(row.kind for row in timed(rows)))


def systems(rows: Iterable[Row]) -> list[str]:
    """The systems by name, errors included, sorted."""
    return sorted({row.system for row in rows})
