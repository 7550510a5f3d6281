"""`docs/strategies.md`: every strategy, where to use it, and what it came to in the last measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import pages
from benchmarks.strategies.report import gap_table, models, of_strategy, ratio_cell, summary_of
from parlay.bench.records import Row
from parlay.bench.summary import Measurements
from parlay.strategies.accept_rules import RULES
from parlay.strategies.catalogue import catalogue
from parlay.strategies.entry import StrategyEntry

INTRODUCTION = """\
A strategy is written `NAME[:KEY=VALUE,...]`: on the command line (`--strategy`), in the Python API (`strategy=`), and
in each request to the server. `parlay strategies` lists them, and `parlay strategies NAME` shows the parameters with
their defaults. [How drafts are made](drafting.md) shows each family in a picture. The docstring of a drafter names its
paper, and what was decided where the paper is silent. Every strategy gives the text of plain decoding unless another
accept rule is asked for (see below and [architecture](architecture.md)).

Cells are the decoding speed over that of plain decoding, with tokens per step in brackets; bold is the best of each
column. The target is SmolLM2-135M-Instruct (GGUF, Q4_1), whose forward takes about 6 ms: batch 1, greedy, answers cut
at their first loop, the default policy. That policy stops drafting where it does not pay, so 1.00 (1.0) means that
there was nothing to gain. The prompts are the first of published sets (EditEval, LLMA's documents, BFCL, Spec-Bench,
HumanEval), two of each kind in two rounds, so a cell is uncertain by about a tenth. No strategy learns from other
requests here. The larger the target, the more an expensive drafter can gain.

The heads of `eagle3` and `medusa` and the draft model are those that come with the package. Other heads were trained
for eight minutes on one core of the same machine, on some hundred thousand tokens, so the table shows what they cost
rather than what they can do: [how often they are right](../benchmarks/results/modelled.md). `ppd`, `pass`, `bita` and
`speculative-streaming` were not run here: their training runs through the whole target, so twenty minutes of a shared
core were 22 to 170 updates, and [they are right seldom](../benchmarks/results/modelled-inputs.md).
"""


FORMULA = """\
*Ideal* is the speed over plain decoding that follows from measured numbers: tokens per step, the seconds of forwards
of the mean verified draft and its root (`rows`), and the seconds of drafting (Leviathan et al. 2023; Chen et al. 2024).
The engine's own time is not in it. A gap of more than 15 % is marked. The ideal of `lookahead` is too high: the rows of
its window are probes, which no count of drafted nodes includes. Ratios near 1.00 are as uncertain as the timing of
single forwards.
"""


def guide(header: Mapping[str, Any], runs: Sequence[Sequence[Row]], model: str) -> str:
    """Markdown. ``runs`` were measured apart: ratios are taken within each, and the first decides what is best."""
    own = [found for rows in runs for name, found in models(Measurements(rows)) if name == model]
    parts = [
        "# Strategies",
        INTRODUCTION.rstrip(),
        f"{pages.about(header)} Made by `python -m benchmarks.strategies --data DIR --guide docs/strategies.md`; "
        "[raw rows and more tables](../benchmarks/results/strategies.md), "
        "[what proposing costs](../benchmarks/results/propose.md), "
        "[the scaling law of lookahead](../benchmarks/results/scaling/lookahead.md).",
        *table(own),
        "## Measured against the formula",
        FORMULA.rstrip(),
        *gap_table(own[0]),
        "## Accept rules",
        "A rule is asked for by `rule=NAME` among a strategy's parameters. Rules of level `distribution` keep the "
        "distribution of the text, not the text itself. They need drafts that were drawn (`iid`, `without "
        "replacement`), so they go with draft models, which then draw. `point` drafts are fixed guesses.",
        *rules(),
    ]
    return "\n\n".join(parts) + "\n"


def table(runs: Sequence[Measurements]) -> list[str]:
    """A line for each entry of the catalogue."""
    kinds = runs[0].each(lambda cell: cell.workload)
    best = {kind: fastest(runs[0], kind) for kind in kinds}
    lines = []
    for entry in catalogue().values():
        found, strategy = next((each for run in runs if (each := measured(run, entry.name))), (None, ""))
        own = found and of_strategy(found, strategy)
        cells: Sequence[str] = not_run(entry, len(kinds))
        if found and own and any(row.tokens for row in own.rows):
            cells = [bold(ratio_cell(found, own, kind), best[kind] == strategy) for kind in kinds]
        lines.append((f"`{strategy or entry.name}`", what(entry), entry.when, *cells))
    return pages.table(("strategy", "what it does", "use it where", *kinds), lines)


def measured(found: Measurements, name: str) -> tuple[Measurements, str] | None:
    """The measurements and the spelling under which they know a strategy; None if they don't."""
    names = found.each(lambda cell: cell.strategy)
    spec = next((each for each in names if each.partition(":")[0] == name), None)
    return None if spec is None else (found, spec)


def what(entry: StrategyEntry) -> str:
    """Summary and source."""
    return f"{entry.summary} ({entry.reference})" if entry.reference else entry.summary


def not_run(entry: StrategyEntry, count: int) -> list[str]:
    """The row of an entry that needs more than the target."""
    return [f"not run: needs {entry.needs}", *[""] * (count - 1)] if count else []


def fastest(found: Measurements, kind: str) -> str:
    """The strategy with the best ratio on a kind of text."""
    names = found.each(lambda cell: cell.strategy)
    summaries = {name: summary_of(found, of_strategy(found, name), kind) for name in names}
    ratios = {name: each.ratio.median for name, each in summaries.items() if each and each.ratio}
    return max(ratios, key=lambda name: ratios[name], default="")


def bold(text: str, wanted: bool) -> str:
    """The text, in bold if wanted."""
    return f"**{text}**" if wanted and text else text


def rules() -> list[str]:
    """A line for each accept rule."""
    lines = (
        (f"`{rule.name}`", rule.summary, str(rule.exactness), rule.kind.replace("_", " "), rule.reference)
        for rule in RULES.values()
    )
    return pages.table(("rule", "what it does", "exactness", "drafts", "source"), lines)
