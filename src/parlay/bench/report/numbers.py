"""From rows to numbers: conditions, systems, ratios against plain decoding that were taken within each round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from parlay import types
from parlay.bench.forwards import is_forward
from parlay.bench.records import PLAIN, Row
from parlay.bench.summary import Spread


@dataclass(frozen=True, slots=True, order=True)
class Conditions:
    """What systems are compared under."""

    model: str
    concurrency: int
    temperature: float
    context: int
    busy: int
    modelled: bool

    @property
    def words(self) -> str:
        """A heading, without conditions that have their usual value."""
        return "; ".join(
            filter(
                None,
                (
                    self.model,
                    f"{self.concurrency} requests at once" if self.concurrency != 1 else "",
                    f"temperature {self.temperature:g}" if self.temperature else "",
                    f"{self.context} tokens of context" if self.context else "",
                    f"{self.busy} busy processes beside" if self.busy else "",
                    "modelled, not measured" if self.modelled else "",
                ),
            )
        )


def conditions_of(row: Row) -> Conditions:
    """The conditions of a row."""
    cell = row.cell
    return Conditions(cell.model, cell.concurrency, cell.temperature, cell.context, cell.busy, row.modelled)


def all_conditions(rows: Iterable[Row]) -> list[Conditions]:
    """All conditions of the rows, in order of appearance."""
    return list(dict.fromkeys(conditions_of(row) for row in rows))


def system(row: Row) -> str:
    """The name of the system of a row."""
    return str(row.cell.system)


def systems(rows: Iterable[Row]) -> list[str]:
    """In order of appearance."""
    return list(dict.fromkeys(system(row) for row in rows))


def workloads(rows: Iterable[Row]) -> list[str]:
    """In order of appearance."""
    return list(dict.fromkeys(row.cell.workload for row in rows))


def decoded(rows: Iterable[Row]) -> list[Row]:
    """Rows of decoded text: no failures, no timed forwards."""
    return [row for row in rows if not is_forward(row) and not row.error]


def timed(rows: Iterable[Row]) -> list[Row]:
    """Rows with a speed."""
    return [row for row in decoded(rows) if row.tokens_per_second > 0]


def speed(rows: Iterable[Row]) -> float:
    """The median of the rounds; 0 where nothing was timed."""
    rates = [row.tokens_per_second for row in timed(rows)]
    return median(rates) if rates else 0.0


def ratio(rows: Sequence[Row], name: str, workload: str, base: str = PLAIN) -> Spread | None:
    """How many times as fast as ``base``: over the rounds in which both were timed; None without one."""
    own = [row for row in timed(rows) if row.cell.workload == workload]
    fast, slow = ({row.round: row.tokens_per_second for row in own if system(row) == who} for who in (name, base))
    return Spread.of(fast[turn] / slow[turn] for turn in fast if turn in slow)


def geometric(values: Sequence[float]) -> float:
    """Geometric mean; 0 without values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


def tokens_per_step(rows: Iterable[Row]) -> float:
    """`parlay.types.tokens_per_step` of all rows whose steps were counted."""
    own = [row for row in decoded(rows) if row.steps]
    return types.tokens_per_step(sum(row.tokens for row in own), sum(row.steps for row in own))


def same(rows: Iterable[Row]) -> str:
    """How many texts equal those of plain decoding; empty if no text is promised."""
    own = decoded(rows)
    told = sum(row.of for row in own)
    return f"{sum(row.same for row in own)}/{told}" if told else ""


def only(rows: Iterable[Row], name: str | None = None, workload: str | None = None) -> list[Row]:
    """The rows of a system, of a workload, or of both."""
    return [row for row in rows if name in (None, system(row)) and workload in (None, row.cell.workload)]
