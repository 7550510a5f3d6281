"""Which strategy is quickest for a model on a user's own prompts: all are measured once, the best again.

The loop is that of `parlay bench`: strategies take turns with plain decoding on the same requests, and every text is
compared with plain decoding's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parlay.bench import workloads
from parlay.bench.records import PLAIN, Results
from parlay.bench.runner import Bench, BenchPlan
from parlay.bench.summary import CellSummary, summarise
from parlay.bench.workloads import Item, Message, Workload
from parlay.llm.llm import LLM
from parlay.strategies.catalogue import catalogue
from parlay.types import Exactness

FINALISTS = 4
"""Of all strategies so many are measured again."""
LEAST_GAIN = 1.02
"""Below this many times plain decoding's speed nothing is recommended."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is measured: ``strategies``, each ``rounds`` times if it is among the best of the first round."""

    strategies: tuple[str, ...]
    workload: Workload
    rounds: int = 3
    max_tokens: int = 64
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy as it was measured in so many ``rounds``.

    ``speed`` is the median ratio to plain decoding, None where nothing was timed. ``same`` texts of ``of`` were those
    of plain decoding.
    """

    strategy: str
    rounds: int
    speed: float | None
    low: float
    high: float
    tokens_per_step: float
    same: int
    of: int
    recommended: bool = False
    error: str = ""


def read_prompts(path: Path, most: int) -> Workload:
    """The first prompts of a file: records as `parlay bench` reads them, or lines of text. Raises ValueError."""
    if any(path.name.endswith(end) for end in (".jsonl", ".json", ".zst", ".gz")):
        items = [item for workload in workloads.load([str(path)]) for item in workload.items]
        return Workload("prompts", tuple(items[:most]))
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"can't read {path}: {error}") from None
    if not lines:
        raise ValueError(f"{path} holds no prompts")
    items = [Item(id=str(place), messages=(Message("user", line),)) for place, line in enumerate(lines)]
    return Workload("prompts", tuple(items[:most]))


def without_training(llm: LLM) -> tuple[str, ...]:
    """The strategies that work for the model by their name alone, without anything that was trained."""
    entries = catalogue()
    kept = (Exactness.BITS, Exactness.SEED)
    return tuple(
        name
        for name in llm.offered()
        if entries[name].training == "none" and entries[name].factory and entries[name].exactness in kept
    )


def recommend(llm: LLM, trial: Trial, tell: Callable[[str], object] = bool) -> list[Candidate]:
    """All strategies: those that were measured again, the quickest first, then the others; last those that failed.

    Recommended are those among the first that are quicker than plain decoding and gave its texts.
    """
    with tempfile.TemporaryDirectory(prefix="parlay-recommend-") as folder:
        results = Results(Path(folder) / "rows.jsonl", {}, fresh=True)
        everyone = _plan(llm, trial, trial.strategies, 1)
        tell(f"{len(trial.strategies)} strategies, {len(trial.workload.items)} prompts")
        Bench(llm, everyone, results).run()
        best = [each.strategy for each in _ranked(results, everyone, 1)[:FINALISTS] if each.speed]
        if best and trial.rounds > 1:
            tell(f"again: {', '.join(best)}")
            Bench(llm, _plan(llm, trial, tuple(best), trial.rounds), results).run()
        return _ranked(results, everyone, trial.rounds)


def _plan(llm: LLM, trial: Trial, strategies: tuple[str, ...], rounds: int) -> BenchPlan:
    return BenchPlan(
        model=llm.runner.spec.name,
        strategies=strategies,
        workloads=(trial.workload,),
        temperatures=(trial.temperature,),
        rounds=rounds,
        max_tokens=trial.max_tokens,
    )


def _ranked(results: Results, plan: BenchPlan, rounds: int) -> list[Candidate]:
    """Those that were measured in all ``rounds`` first, and last those that failed, or whose texts differ."""
    summaries = summarise(results.rows, plan.cells())
    found = [_candidate(each, rounds) for each in summaries if each.cell.strategy != PLAIN]
    found.sort(key=lambda each: (each.same == each.of and not each.error, each.rounds, each.speed or 0.0), reverse=True)
    return found


def _candidate(cell: CellSummary, rounds: int) -> Candidate:
    same, of = cell.same or (0, 0)
    ratio, measured = cell.ratio, len(cell.rows)
    return Candidate(
        cell.cell.strategy,
        measured,
        ratio.median if ratio else None,
        ratio.low if ratio else 0.0,
        ratio.high if ratio else 0.0,
        cell.tokens_per_step or 0.0,
        same,
        of,
        bool(measured >= rounds and ratio and ratio.median >= LEAST_GAIN and 0 < of == same and not cell.error),
        cell.error or (cell.note if not ratio else ""),
    )
