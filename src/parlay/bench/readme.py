"""The table of the preset ``readme``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from parlay.bench.against import NAME
from parlay.bench.records import OURS, PLAIN
from parlay.bench.report.markdown import Table, markdown
from parlay.bench.summary import CellSummary, plain_of

HEAD = ("workload", "strategy", "against plain", "against `transformers` at its best", "tokens per step", "same text")


def readme_table(summaries: Sequence[CellSummary]) -> str:
    """Markdown, a line for each strategy and workload. Of `transformers` the fastest mode that was measured counts.

    Cells in which it can't be measured are left out: it decodes greedily, one request at a time.
    """
    others = [each for each in summaries if each.cell.engine == NAME]
    own = [each for each in summaries if each.cell.engine == OURS and each.cell.strategy != PLAIN and each.rows]
    alike = [each for each in own if each.cell.concurrency == 1 and not each.cell.temperature]
    return markdown(Table(HEAD, tuple(_line(each, others) for each in alike)))


def _line(each: CellSummary, others: Iterable[CellSummary]) -> tuple[str, ...]:
    beside = [other for other in others if plain_of(other.cell) == plain_of(each.cell)]
    best = _against_best(each, beside)
    return (
        each.cell.workload + (f" behind {each.cell.context:,} tokens" if each.cell.context else ""),
        f"`{each.cell.strategy}`",
        "-" if each.ratio is None else f"{each.ratio.median:.2f}",
        "-" if best is None else f"{best:.1f}",
        "-" if each.tokens_per_step is None else f"{each.tokens_per_step:.2f}",
        f"{each.same[0]}/{each.same[1]}" if each.same else "-",
    )


def _against_best(each: CellSummary, others: Iterable[CellSummary]) -> float | None:
    """Median over rounds of its speed over the highest of theirs in the same round; None where there are none."""
    best: dict[int, float] = {}
    for other in others:
        for row in other.rows:
            best[row.round] = max(best.get(row.round, 0.0), row.tokens_per_second)
    ratios = [row.tokens_per_second / best[row.round] for row in each.rows if best.get(row.round)]
    return median(ratios) if ratios else None
