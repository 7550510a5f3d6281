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
A strategy is named `NAME[:KEY=VALUE,...]`, on the command line, in the Python API, per request. `parlay strategies`
lists them, `parlay strategies NAME` tells the parameters with their defaults, and the docstring of the drafter names
the paper and what was decided where it is silent. All give the very text of plain decoding (`bits` where the model's
kernels allow it, see [architecture](architecture.md)) unless another accept rule is asked for.

Cells are the speed against plain decoding, with tokens per step in brackets, at batch 1, greedy, tokens before any loop
only, under the default policy, which stops drafting where it does not pay: a cell near 1.00 (1.0) says that nothing was
to be had. The target is SmolLM2-135M-Instruct (GGUF, Q4_1) with its chat template, the prompts are the first of
published sets (EditEval, LLMA's documents, BFCL, Spec-Bench, HumanEval): three of each kind in five rounds, so a
cell is uncertain by some five percent. A forward takes some 3 ms there. Larger targets favour dearer drafters.
Bold: the best of its column. Strategies that want a draft model are not in the table: none with this tokenizer is
smaller.
"""


FORMULA = """\
The ideal is F2 and F4 of the literature with everything in them measured here: tokens per step, the seconds of forwards
of so many rows, and those of drafting. `rows` are those of the mean verified draft and its root. What is marked lacks
more than 15 %. For `lookahead` it is the window: its rows are probes, verified in each step but no proposals, so that
they are in no count and the ideal has them for nothing. Near 1.00, where a drafter has one short draft now and then,
the ideal of so few rows is as uncertain as the timing of single forwards.
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
        "`rule=NAME`. Those of `distribution` keep the distribution of the text but not the text; they want drafts "
        "that were drawn, which the draft models make when such a rule is named.",
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
        cells: Sequence[str] = not_run(entry, len(kinds))
        if found:
            own = of_strategy(found, strategy)
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
    """What stands in the row of an entry that needs more than the target."""
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
