"""What the rounds of each cell come to: medians with their spread, and ratios to plain decoding of the same round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median

from parlay.bench.records import PLAIN, Cell, Row

_ERROR = math.sqrt(math.pi / 2) * 1.4826
"""Of normally distributed values: the median's standard error over the mean's, and the deviation over the median
distance."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and the lowest and highest of them. ``error`` is the standard error of the median,
    from the median distance to it, so that a single stray value counts for little."""

    median: float
    low: float
    high: float
    error: float = 0.0

    @staticmethod
    def of(values: Iterable[float]) -> Spread | None:
        """None where there are no values."""
        known = sorted(values)
        if not known:
            return None
        middle = median(known)
        away = median(abs(value - middle) for value in known)
        return Spread(middle, known[0], known[-1], _ERROR * away / math.sqrt(len(known)))


@dataclass(frozen=True, slots=True)
class Summary:
    """All rounds of one cell. ``rows`` are those that measured something; without any, ``note`` or ``error`` says why.

    ``ratio`` is decoding speed over that of plain decoding in the same round, ``total_ratio`` the same of whole
    requests, prompts included.
    """

    cell: Cell
    rows: tuple[Row, ...]
    speed: Spread | None
    ratio: Spread | None
    total_ratio: Spread | None
    note: str
    error: str

    @property
    def ttft(self) -> float | None:
        """Median seconds to the first token."""
        return _median(value for row in self.rows for value in row.ttft)

    @property
    def itl(self) -> float | None:
        """Median, over requests, of the mean seconds between tokens."""
        return _median(value for row in self.rows for value in row.itl)

    @property
    def tokens_per_step(self) -> float | None:
        return _over(sum(row.tokens for row in self.rows), sum(row.steps for row in self.rows))

    @property
    def acceptance_rate(self) -> float | None:
        return _over(sum(row.accepted for row in self.rows), sum(row.proposed for row in self.rows))

    @property
    def shares(self) -> tuple[float, float, float] | None:
        """Of the time after prefill: drafting, verifying, the rest."""
        draft = sum(row.draft_seconds for row in self.rows)
        verify = sum(row.verify_seconds for row in self.rows)
        overhead = sum(row.overhead_seconds for row in self.rows)
        total = draft + verify + overhead
        return (draft / total, verify / total, overhead / total) if total else None

    @property
    def peak_memory_bytes(self) -> int:
        return max((row.peak_memory_bytes for row in self.rows), default=0)

    @property
    def looped(self) -> float | None:
        return next((row.looped for row in self.rows if row.looped is not None), None)

    @property
    def same(self) -> tuple[int, int] | None:
        """Requests whose text was that of plain decoding, of how many; None where nothing promises it."""
        compared = sum(row.of for row in self.rows)
        return (sum(row.same for row in self.rows), compared) if compared else None

    @property
    def joules_per_token(self) -> float | None:
        metered = [row for row in self.rows if row.joules is not None]
        return _over(sum(row.joules or 0.0 for row in metered), sum(row.tokens for row in metered))

    def tokens_per_unit(self, price_per_hour: float) -> float | None:
        """Tokens that one unit of currency buys, prompts' time included, where an hour of the machine costs so much."""
        rate = _over(sum(row.tokens for row in self.rows), sum(row.seconds for row in self.rows))
        return None if rate is None else 3600 * rate / price_per_hour


def plain_of(cell: Cell) -> Cell:
    """The cell of plain decoding that a cell is held against."""
    return replace(cell, strategy=PLAIN)


def summarise(rows: Sequence[Row], cells: Iterable[Cell] | None = None) -> list[Summary]:
    """A summary for each cell that has rows, of those named, or else of all in the order of their first rows."""
    own: dict[Cell, list[Row]] = {}
    for row in rows:
        own.setdefault(row.cell, []).append(row)
    return [_summary(cell, own[cell], own.get(plain_of(cell), ())) for cell in cells or own if cell in own]


def geometric_means(summaries: Iterable[Summary]) -> dict[str, tuple[float, int]]:
    """Of the ratios of each strategy but plain decoding, over so many cells."""
    ratios: dict[str, list[float]] = {}
    for each in summaries:
        if each.cell.strategy != PLAIN and each.ratio is not None and each.ratio.median > 0:
            ratios.setdefault(each.cell.strategy, []).append(each.ratio.median)
    return {strategy: (geometric_mean(values), len(values)) for strategy, values in ratios.items()}


def _summary(cell: Cell, rows: Sequence[Row], plain: Sequence[Row]) -> Summary:
    measured = tuple(row for row in rows if row.requests and not row.error)
    beside = {row.round: row for row in plain if row.requests and not row.error}
    pairs = [(row, beside[row.round]) for row in measured if row.round in beside]
    return Summary(
        cell,
        measured,
        Spread.of(row.tokens_per_second for row in measured if row.decode_seconds > 0),
        Spread.of(
            own.tokens_per_second / other.tokens_per_second
            for own, other in pairs
            if own.decode_seconds > 0 and other.tokens_per_second > 0
        ),
        Spread.of(
            (own.tokens * other.seconds) / (own.seconds * other.tokens)
            for own, other in pairs
            if own.seconds > 0 and other.tokens > 0
        ),
        next((row.note for row in rows if row.note), ""),
        next((row.error for row in rows if row.error), ""),
    )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def _over(above: float, below: float) -> float | None:
    return above / below if below else None
