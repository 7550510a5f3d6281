"""Measures strategies on tasks, and stores as rows how many answers are right at how many tokens per forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType

from parlay.bench.quality.scores import score
from parlay.bench.quality.tasks import Task
from parlay.bench.quality.writers import Writer
from parlay.bench.records import Cell, Results, Row
from parlay.certificates.gate import rule_level
from parlay.options import UsageError, nearest
from parlay.strategies.entries.canvases import DENOISE, OWN
from parlay.strategies.spelling import parse
from parlay.types import Exactness, ParlayError

PART = "quality"
EXACT = "exact"
"""Name of the curve of all exact strategies. They write plain decoding's text, so their accuracies are equal."""

_COUNTS = ("k=1", "k=2", "k=3", "k=4", "k=6", "k=8", "k=16")
SWEEP: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "threshold": tuple(f"threshold={each}" for each in (0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1)),
        "confidence": _COUNTS,
        "margin": _COUNTS,
        "entropy": _COUNTS,
        "random": _COUNTS,
        "left-to-right": _COUNTS,
        "factor": tuple(f"factor={each}" for each in (0.5, 0.9, 1, 1.3, 1.6, 2, 4, 16)),
        "entropy-bound": tuple(f"bound={each}" for each in (0, 0.1, 0.5, 1, 2, 4, 16)),
        "kl-stability": tuple(
            f"threshold={threshold},history={history}" for history in (2, 1) for threshold in (0.9, 0.7, 0.5, 0.3)
        ),
        "credit": tuple(f"threshold={each}" for each in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1)),
        "mask-predict": tuple(f"steps={each}" for each in (1, 2, 3, 4, 6, 8, 16)),
    }
)
"""The settings of each selector that make its curve."""


def sweep(selectors: Sequence[str]) -> tuple[str, ...]:
    """Return strategies that fill canvases by these selectors, one for each setting in `SWEEP`.

    Raises UsageError for an unknown selector.
    """
    for name in selectors:
        if name not in SWEEP:
            raise UsageError(f"there is no selector {name!r}: {nearest(name, SWEEP)}")
    texts = [f"{DENOISE}:selector={name},{setting}" for name in dict.fromkeys(selectors) for setting in SWEEP[name]]
    return tuple(str(parse(text)) for text in texts)


@cache
def selector_of(strategy: str) -> str:
    """Return the name of a strategy's curve: its selector, `EXACT` for an exact strategy, or else the strategy."""
    spec = parse(strategy)
    if spec.name == DENOISE:
        return str(spec.settings["selector"])
    return strategy if rule_level(spec) is Exactness.LOSSY else EXACT


@cache
def setting_of(strategy: str) -> str:
    """Return the options of a strategy's selector: the first one, and others that are set.

    A strategy without a selector is returned itself.
    """
    spec = parse(strategy)
    if spec.name != DENOISE:
        return strategy
    first = OWN[str(spec.settings["selector"])][0]
    others = [f"{key}={value}" for key, value in spec.parameters if key not in ("selector", first)]
    return " ".join([f"{first}={spec.settings[first]:g}", *others])


def measure(
    writer: Writer,
    tasks: Sequence[Task],
    strategies: Sequence[str],
    results: Results,
    step: Callable[[str], object] = str,
) -> None:
    """Measure each strategy once on each task, unless the results hold it already; ``step`` gets a note after each.

    A strategy that fails gets a row with the reason.
    """
    for task in tasks:
        for strategy in strategies:
            cell = cell_of(writer, task, strategy)
            if not results.of(cell):
                results.add([_row(writer, task, cell)])
            step(f"{task.name} {selector_of(strategy)}")


def cell_of(writer: Writer, task: Task, strategy: str) -> Cell:
    """Return the cell of a writer's answers to a task with a strategy."""
    return Cell(part=PART, model=writer.name, strategy=strategy, workload=task.name, temperature=writer.temperature)


def _row(writer: Writer, task: Task, cell: Cell) -> Row:
    try:
        answers = writer.answers(task, cell.strategy)
    except (ParlayError, ValueError) as error:
        return Row(cell=cell, error=str(error))
    scores = [score(problem, answer.text) for problem, answer in answers]
    values = {
        "right": float(sum(one.right for one in scores)),
        "loose": float(sum(one.loose for one in scores)),
        "places": sum(one.places for one in scores) / len(scores),
    }
    if (expected := writer.expected(task, cell.strategy)) is not None:
        values |= {"expected": expected.share, "sigma": expected.sigma}
    return Row(
        cell=cell,
        requests=len(scores),
        tokens=sum(answer.tokens for _, answer in answers),
        steps=sum(answer.steps for _, answer in answers),
        exactness=str(answers[0][1].exactness),
        values=values,
    )
