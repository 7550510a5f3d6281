"""Summarises the rounds of each cell: medians with their spread, and ratios to plain decoding in the same round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, geometric_mean, median, stdev
from typing import TypeVar

from parlay.bench.records import MODELLED, OURS, PLAIN, Cell, Row
from parlay.types import tokens_per_step

T = TypeVar("T")

_ERROR = math.sqrt(math.pi / 2) * 1.4826
"""A product of two factors, both for normally distributed values: the median's standard error over the mean's, and the
standard deviation over the median absolute deviation."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and the lowest and highest of them.

    ``error`` is the standard error of the median. It is estimated from the median absolute deviation, on which a single
    outlier has little influence.
    """

    median: float
    low: float
    high: float
    error: float = 0.0

    @staticmethod
    def of(values: Iterable[float]) -> Spread | None:
        """Summarise the values; None if there are none."""
        known = sorted(values)
        if not known:
            return None
        middle = median(known)
        away = median(abs(value - middle) for value in known)
        return Spread(middle, known[0], known[-1], _ERROR * away / math.sqrt(len(known)))


@dataclass(frozen=True, slots=True)
class Interval:
    """A geometric mean of ratios over ``count`` prompts, and its 95 % interval, from Student's t on the logarithms.

    A conversation counts as one prompt, because its turns are similar. The interval says what to expect of other
    prompts of the same kind, not of this machine on another day.
    """

    mean: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(ratios: Iterable[float], among: int = 1) -> Interval | None:
        """Compute the interval of the ratios; None for fewer than two, which have no spread.

        By Bonferroni's correction, ``among`` such intervals all hold together with a probability of 95 %.
        """
        logs = [math.log(ratio) for ratio in ratios if ratio > 0]
        if len(logs) < 2:
            return None
        middle = fmean(logs)
        away = student_t(len(logs) - 1, among) * stdev(logs) / math.sqrt(len(logs))
        return Interval(math.exp(middle), math.exp(middle - away), math.exp(middle + away), len(logs))


def student_t(freedom: int, among: int = 1) -> float:
    """Return the t at which Student's distribution has P(abs(T) > t) = 0.05 / ``among``.

    ``freedom`` is the number of degrees of freedom. The t is found by bisection.
    """
    low, high = 0.0, math.pi / 2  # bounds of the angle whose tangent is t / sqrt(degrees of freedom)
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if 1 - _within(angle, freedom) > 0.05 / among else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return P(abs(T) <= t) for the t of this angle, by the closed form for whole degrees of freedom.

    The angle is atan(t / sqrt(``freedom``)) (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4).
    """
    odd = freedom % 2
    term, total = math.sin(angle) * math.cos(angle) ** odd, 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    return 2 / math.pi * (angle + total) if odd else total


@dataclass(frozen=True, slots=True)
class CellSummary:
    """The summary of all rounds of one cell. ``rows`` are the rows that measured something.

    If there are none, ``note`` or ``error`` says why. ``ratio`` is the decoding speed over plain decoding's in the same
    round; ``interval`` is its mean over prompts.
    """

    cell: Cell
    rows: tuple[Row, ...]
    speed: Spread | None
    ratio: Spread | None
    interval: Interval | None
    note: str
    error: str

    @property
    def ttft(self) -> float | None:
        """Median, over requests, of the seconds to the first token."""
        return _median(value for row in self.rows for value in row.ttft)

    @property
    def itl(self) -> float | None:
        """Median, over requests, of a request's mean seconds between tokens."""
        return _median(value for row in self.rows for value in row.itl)

    @property
    def tokens_per_step(self) -> float | None:
        return tokens_per_step(sum(row.tokens for row in self.rows), sum(row.steps for row in self.rows)) or None

    @property
    def acceptance_rate(self) -> float | None:
        return _over(sum(row.accepted for row in self.rows), sum(row.proposed for row in self.rows))

    @property
    def shares(self) -> tuple[float, float, float] | None:
        """Shares of drafting, verifying and the rest in the time after prefill; None if no forward was timed."""
        draft = sum(row.draft_seconds for row in self.rows)
        verify = sum(row.verify_seconds for row in self.rows)
        overhead = sum(row.overhead_seconds for row in self.rows)
        total = draft + verify + overhead
        return (draft / total, verify / total, overhead / total) if verify else None

    @property
    def peak_memory_bytes(self) -> int:
        return max((row.peak_memory_bytes for row in self.rows), default=0)

    @property
    def looped(self) -> float | None:
        return next((row.looped for row in self.rows if row.looped is not None), None)

    @property
    def same(self) -> tuple[int, int] | None:
        """Number of requests with plain decoding's text, and how many were compared; None if none were."""
        compared = sum(row.of for row in self.rows)
        return (sum(row.same for row in self.rows), compared) if compared else None

    @property
    def joules_per_token(self) -> float | None:
        """Measured joules per token; None without measurements."""
        return self._joules_per_token(modelled=False)

    @property
    def modelled_joules_per_token(self) -> float | None:
        return self._joules_per_token(modelled=True)

    def _joules_per_token(self, *, modelled: bool) -> float | None:
        metered = [row for row in self.rows if row.joules is not None and (row.energy == MODELLED) == modelled]
        return _over(sum(row.joules or 0.0 for row in metered), sum(row.tokens for row in metered))

    def tokens_per_unit(self, price_per_hour: float) -> float | None:
        """Return tokens per unit of currency if an hour of the machine costs this much. Prompts' time is included."""
        rate = _over(sum(row.tokens for row in self.rows), sum(row.seconds for row in self.rows))
        return None if rate is None else 3600 * rate / price_per_hour


class Measurements:
    """Rows by cell, from which results pages are made."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(rows)
        self._by_cell: dict[Cell, list[Row]] = {}
        for row in self.rows:
            self._by_cell.setdefault(row.cell, []).append(row)

    @property
    def cells(self) -> list[Cell]:
        """The cells that have rows, in the order of their first rows."""
        return list(self._by_cell)

    def of(self, cell: Cell) -> Sequence[Row]:
        return self._by_cell.get(cell, ())

    def only(self, wanted: Callable[[Cell], bool]) -> Measurements:
        """Return the measurements of the wanted cells."""
        return Measurements(row for row in self.rows if wanted(row.cell))

    def each(self, value: Callable[[Cell], T]) -> list[T]:
        """Return the results of ``value`` for all cells, each distinct result once, in order."""
        return list(dict.fromkeys(map(value, self._by_cell)))

    def summary(self, cell: Cell) -> CellSummary | None:
        """Return the summary of a cell; None if it has no rows."""
        rows = self.of(cell)
        return summary(rows, self.of(plain_of(cell))) if rows else None

    def ratio(self, cell: Cell, base: Cell) -> Spread | None:
        """Return the decoding speed of a cell over the speed of ``base`` in the same rounds."""
        return ratio(self.of(cell), self.of(base))


def plain_of(cell: Cell) -> Cell:
    """Return the cell of Parlay's plain decoding that a cell is compared with."""
    return replace(cell, engine=OURS, strategy=PLAIN)


def summarise(rows: Sequence[Row], cells: Iterable[Cell] | None = None) -> list[CellSummary]:
    """Return a summary for each of ``cells`` that has rows. Without ``cells``, all cells of the rows are summarised."""
    own: dict[Cell, list[Row]] = {}
    for row in rows:
        own.setdefault(row.cell, []).append(row)
    return [summary(own[cell], own.get(plain_of(cell), ())) for cell in cells or own if cell in own]


def summary(rows: Sequence[Row], base: Sequence[Row]) -> CellSummary:
    """Summarise one cell's rows, compared with the rows ``base`` of plain decoding."""
    own = measured(rows)
    return CellSummary(
        rows[0].cell,
        own,
        Spread.of(row.tokens_per_second for row in own if row.tokens_per_second),
        ratio(own, base, decode_rate),
        Interval.of(_by_talk(own, base)) if rows[0].cell != plain_of(rows[0].cell) else None,
        next((row.note for row in rows if row.note), ""),
        next((row.error for row in rows if row.error), ""),
    )


def measured(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows in which something was decoded."""
    return tuple(row for row in rows if row.requests and not row.error)


def ratio(rows: Iterable[Row], base: Iterable[Row], rate: Callable[[Row], float] | None = None) -> Spread | None:
    """Return how many times as fast as ``base`` the rows are, by rounds that have both; None without such a round.

    ``rate`` gives the speed of a row, by default `decode_rate`.
    """
    rate = rate or decode_rate
    below = {row.round: rate(row) for row in measured(base)}
    rates = [(rate(row), below.get(row.round, 0.0)) for row in measured(rows)]
    return Spread.of(own / other for own, other in rates if own and other)


def _by_talk(rows: Iterable[Row], base: Iterable[Row]) -> list[float]:
    """Return the speedup of each prompt or conversation: the geometric mean over its turns and over rounds.

    The result is empty if requests ran together, or if the rows do not tell which request each time belongs to.
    """
    below = {row.round: row for row in measured(base)}
    rounds = [
        [
            (talk, math.log(other / own))
            for talk, own, other in zip(_talks(row), row.itl, below[row.round].itl, strict=True)
            if own and other
        ]
        for row in measured(rows)
        if row.round in below and row.cell.concurrency == 1 and _paired(row, below[row.round])
    ]
    if not rounds or len({*map(len, rounds)}) > 1:
        return []
    by_talk: dict[int, list[float]] = {}
    for talk, log in chain.from_iterable(rounds):
        by_talk.setdefault(talk, []).append(log)
    return [math.exp(fmean(logs)) for logs in by_talk.values()]


def _talks(row: Row) -> Sequence[int]:
    """Return the number of the conversation for each of the row's times between tokens."""
    return row.talks or range(len(row.itl))


def _paired(row: Row, base: Row) -> bool:
    """Whether the times between tokens of both rows belong to the same prompts in the same order.

    A request that emitted once has no such time. If no request of the row is missing, or all texts are equal, the same
    requests are missing in both.
    """
    return len(row.itl) == len(base.itl) > 1 and row.requests in (row.same, len(row.itl))


def decode_rate(row: Row) -> float:
    """Return tokens per second after the first emission."""
    return row.tokens_per_second


def whole_rate(row: Row) -> float:
    """Return tokens per second of whole requests, with the time for their prompts."""
    return row.tokens / row.seconds if row.seconds > 0 else 0.0


def geometric_means(summaries: Iterable[CellSummary]) -> dict[str, tuple[float, int]]:
    """Return the geometric mean of each system's ratios, and their number, by name. Plain decoding has none."""
    ratios: dict[str, list[float]] = {}
    for each in summaries:
        if each.cell != plain_of(each.cell) and each.ratio is not None and each.ratio.median > 0:
            ratios.setdefault(str(each.cell.system), []).append(each.ratio.median)
    return {system: (geometric_mean(values), len(values)) for system, values in ratios.items()}


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def _over(above: float, below: float) -> float | None:
    return above / below if below else None
