"""Measured against ideal: the speed that the literature's formulas give a strategy, with measured numbers in them.

The chain formula: with each node accepted with probability a, g nodes give (1 - a^(g+1)) / (1 - a) tokens per step
(Leviathan et al. 2023). For any tree, tokens per step are 1 plus the sum over nodes of the chance that each is
accepted, which is what was counted; a step costs the forward of its rows and the drafting (Chen et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from parlay.bench.forwards import ForwardPrices, curves
from parlay.bench.records import OURS, PLAIN, Row
from parlay.bench.report.numbers import all_conditions, conditions_of, only, ratio, systems, timed, workloads
from parlay.bench.report.pieces import Missing, ScatterChart, Section, Table

TITLE = "Measured against ideal"
TEXT = (
    "Ideal seconds of a request are those of its forwards, at the measured cost of so many rows, and of its drafting, "
    "with the acceptance that was counted. Speeds are relative to plain decoding, whose ideal is forwards of one row. "
    "What measured speed lacks is the engine's own time, and steps unlike the mean step. The chain formula has one "
    "acceptance rate for all positions: where it is far from the counted tokens per step, acceptance depends on the "
    "position. Costs of forwards are those behind the shortest text that was timed; gaps of more than 15 % are marked."
)
EXPLAIN = 0.15
"""A gap that the report marks."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The sum over a strategy's rows of one workload, without the first step of each request, which is prefill's."""

    tokens: int
    steps: int
    drafted: int
    """Steps with a draft, at most."""
    proposed: int
    draft_seconds: float

    def seconds(self, cost: ForwardPrices, context: int) -> float:
        """Ideal seconds: forwards and drafting."""
        plain = cost.forward(1, context)
        if not self.drafted:
            return self.steps * plain + self.draft_seconds
        whole, extra = divmod(self.proposed, self.drafted)
        rows, share = 1 + whole, extra / self.drafted
        verify = (1 - share) * cost.forward(rows, context) + share * cost.forward(rows + 1, context)
        return (self.steps - self.drafted) * plain + self.drafted * verify + self.draft_seconds

    def rate(self, cost: ForwardPrices, context: int) -> float:
        """Tokens per ideal second."""
        return self.tokens / self.seconds(cost, context)


def decoding(rows: Sequence[Row]) -> Decoding:
    """The sums of one system's rows on one workload, over all rounds."""
    steps = sum(row.steps - row.requests for row in rows)
    proposed = sum(row.proposed for row in rows)
    firsts = sum(row.proposed_by_position[0] for row in rows if row.proposed_by_position)
    return Decoding(
        tokens=sum(row.decode_tokens for row in rows),
        steps=steps,
        drafted=max(0, min(steps, firsts)),
        proposed=proposed,
        draft_seconds=sum(row.draft_seconds for row in rows),
    )


def against_ideal(rows: Sequence[Row]) -> Section | Missing:
    """Strategies of ours, one request at a time, on models whose forwards were timed."""
    tables: list[Table] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for where in all_conditions(timed(rows)):
        own = [row for row in timed(rows) if conditions_of(row) == where and row.cell.engine == OURS and row.steps]
        known = curves(rows, where.model)
        if known and own and where.concurrency == 1 and not where.modelled:
            cost = ForwardPrices(where.model, known)
            context = where.context or min(known)
            lines, dots = _lines(own, cost, context)
            tables.append(Table(HEAD, tuple(lines), where.words))
            for name, each in dots.items():
                points.setdefault(name, []).extend(each)
    if not tables:
        return Missing(TITLE, "needs timed forwards (--forwards) and decoding, one request at a time, of one model")
    chart = ScatterChart("a dot for each workload", "ideal speed against plain", "measured speed", points)
    return Section(TITLE, TEXT, (chart, *tables))


HEAD = ("strategy", "workload", "tokens per step", "chain formula", "rows", "measured", "ideal", "measured / ideal")


def _lines(
    rows: Sequence[Row], cost: ForwardPrices, context: int
) -> tuple[list[tuple[str, ...]], dict[str, list[tuple[float, float]]]]:
    lines: list[tuple[str, ...]] = []
    dots: dict[str, list[tuple[float, float]]] = {}
    for name in systems(rows):
        for kind in workloads(rows):
            own, plain = only(rows, name, kind), only(rows, PLAIN, kind)
            measured = ratio(rows, name, kind)
            if name == PLAIN or measured is None or not own[0].decode_tokens:
                continue
            done = decoding(own)
            ideal = done.rate(cost, context) / decoding(plain).rate(cost, context)
            share = measured.median / ideal
            mark = "" if abs(share - 1) <= EXPLAIN else " (*)"
            each = 1 + done.proposed / done.drafted if done.drafted else 1.0
            steps = sum(row.tokens for row in own) / sum(row.steps for row in own)
            speeds = (f"{measured.median:.2f}", f"{ideal:.2f}", f"{share:.2f}{mark}")
            lines.append((name, kind, f"{steps:.2f}", chain_formula(own), f"{each:.1f}", *speeds))
            dots.setdefault(name, []).append((ideal, measured.median))
    return lines, dots


def chain_formula(rows: Sequence[Row]) -> str:
    """Tokens per step by the chain formula; empty where drafts are no chains, or none were made."""
    steps = sum(row.steps for row in rows)
    depth = max((len(row.proposed_by_position) for row in rows), default=0)
    proposed, accepted = ([_at(counts, place) for place in range(depth)] for counts in _counts(rows))
    if not depth or proposed[0] > steps or any(later > one for one, later in pairwise(proposed)):
        return ""
    reached = proposed[0] + sum(map(min, accepted, proposed[1:]))
    chance, length = sum(accepted) / reached, sum(proposed) / proposed[0]
    tokens = length + 1 if chance >= 1 else (1 - chance ** (length + 1)) / (1 - chance)
    return f"{1 + (tokens - 1) * proposed[0] / steps:.2f}"


def _counts(rows: Sequence[Row]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    return [row.proposed_by_position for row in rows], [row.accepted_by_position for row in rows]


def _at(counts: Sequence[Sequence[int]], place: int) -> int:
    return sum(each[place] for each in counts if place < len(each))
