"""Writes the page on quality: numbers for each selector, what each task allows, and how well laws predict accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from parlay.bench.quality import plot
from parlay.bench.quality.curves import (
    KEPT,
    Point,
    accuracy_under_parallelism,
    best_accuracy,
    by_selector,
    frontier,
    kept,
    models_of,
    most_parallel,
    over_tasks,
    points,
)
from parlay.bench.quality.run import EXACT, PART, selector_of, setting_of
from parlay.bench.quality.tasks import ITEMS, TASKS
from parlay.bench.records import Row
from parlay.bench.report import plot as plots
from parlay.bench.report.markdown import Section, Table, page
from parlay.types import ParlayError

TITLE = "Quality under parallelism"
PAGE, MEANS, PANELS = "quality.md", "quality.svg", "quality-tasks.svg"
LEVELS = (0.9, 0.8, 0.6)
"""The mean accuracies that PB90, PB80 and PB60 require; see `most_parallel`."""
_COUNTS = (1, 2, 3, ITEMS)

Table2 = Mapping[tuple[str, str], list[Point]]
"""All measured points, by model and task."""


def write(rows: Sequence[Row], origin: Sequence[str], folder: Path, *, pictures: bool) -> list[Path]:
    """Write the page and, with ``pictures``, its plots. Returns their paths. Raises ParlayError if it can't."""
    if pictures:
        plots.check()
    shown = [f"![{TITLE}, the mean over tasks]({MEANS})", f"![By task]({PANELS})"] if pictures else []
    drawn = pictures_of(rows) if pictures else {}
    texts = {PAGE: page(TITLE, [*origin, *shown], sections(rows)), **drawn}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ParlayError(f"can't write the page to {folder}: {error.strerror}") from None
    return [folder / name for name in texts]


def pictures_of(rows: Sequence[Row]) -> dict[str, str]:
    """Draw a plot of the mean over tasks, and one with a panel for each task. Returns SVG by file name.

    A setting is left out if another setting of the same selector has higher accuracy and more tokens per forward.
    """
    table = points(rows)
    models = models_of(table)
    means = {name: curve for model in models for name, curve in _named(model, models, _means(table, model)).items()}
    tasks = list(dict.fromkeys(task for _, task in table))
    each = {
        task: {
            name: curve
            for model in models
            for name, curve in _named(model, models, table.get((model, task), [])).items()
        }
        for task in tasks
    }
    return {MEANS: plot.panels({f"mean over {len(tasks)} tasks": means}), PANELS: plot.panels(each)}


def _named(model: str, models: Sequence[str], own: Iterable[Point]) -> dict[str, Sequence[Point]]:
    curves = by_selector(own)
    return {name if len(models) == 1 else f"{model} {name}": frontier(curve) for name, curve in curves.items()}


def _means(table: Table2, model: str) -> list[Point]:
    return over_tasks([own for (name, _), own in table.items() if name == model])


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the sections of the page for each model, then the failures."""
    table = points(rows)
    found: list[Section] = []
    for model in models_of(table):
        own = {task: each for (name, task), each in table.items() if name == model}
        mine = [row for row in rows if row.cell.model == model and row.cell.part == PART]
        found += [_numbers(model, own), _allowed(model, own), *_laws(model, mine), _settings(model, mine)]
    failed = {f"{row.cell.strategy}: {row.error}": None for row in rows if row.error and row.cell.part == PART}
    return found + [Section(text.partition(":")[0], text) for text in failed]


def _numbers(model: str, own: Mapping[str, Sequence[Point]]) -> Section:
    """Return the section with one line of numbers for each selector, the highest AUP first."""
    best = {task: best_accuracy(each) for task, each in own.items()}
    curves = {task: by_selector(each) for task, each in own.items()}
    means = by_selector(over_tasks(list(own.values())))
    areas = {
        name: sum(accuracy_under_parallelism(curves[task].get(name, ()), best[task]) for task in own) / len(own)
        for name in means
    }
    lines = []
    for name, area in sorted(areas.items(), key=lambda each: -each[1]):
        levels = [_number(most_parallel(means[name], level)) for level in LEVELS]
        lines.append((name, f"{area:.0f}", *_everywhere(own, name), *levels))
    head = ("selector", "AUP", f"{KEPT:.0%} kept on all tasks by", "tokens per forward", "PB90", "PB80", "PB60")
    text = (
        "AUP is the area under the curve of accuracy in percent against tokens per forward, averaged over tasks. "
        "Plain decoding that is always right has an AUP of 100. PB90 is the most tokens per forward at which the mean "
        "accuracy is at least 90 %."
    )
    return Section(f"{model}: one number each", text, (Table(head, tuple(lines)),))


def _everywhere(own: Mapping[str, Sequence[Point]], name: str) -> tuple[str, str]:
    """Return a selector's setting with the most tokens per forward among those that keep enough accuracy on all tasks.

    Also returns its mean tokens per forward. Tasks that no setting can solve do not count. Without such a setting, both
    are "-".
    """
    fine = [
        {point.strategy for point in each if point.accuracy >= KEPT * best_accuracy(each)}
        for each in own.values()
        if best_accuracy(each) > 0
    ]
    means = [point for point in over_tasks(list(own.values())) if selector_of(point.strategy) == name]
    kept_by = [point for point in means if fine and all(point.strategy in each for each in fine)]
    return (setting_of(max(kept_by).strategy), f"{max(kept_by).tokens_per_forward:.2f}") if kept_by else ("-", "-")


def _allowed(model: str, own: Mapping[str, Sequence[Point]]) -> Section:
    """Return the section with one line for each task: the most parallel setting that keeps enough accuracy."""
    lines = []
    for task, each in own.items():
        fine = kept(each)
        exact = [point.accuracy for point in each if selector_of(point.strategy) == EXACT]
        top = max(fine.values()) if fine else None
        setting = _named_setting(top.strategy) if top else "-"
        known = f"{max(exact):.0%}" if exact else "-"
        lines.append((task, known, f"{best_accuracy(each):.0%}", setting, _number(top and top.tokens_per_forward)))
    head = ("task", "token by token", "best", f"{KEPT:.0%} of it kept by", "tokens per forward")
    return Section(f"{model}: what each task allows", "", (Table(head, tuple(lines)),))


def _named_setting(strategy: str) -> str:
    """Return a setting with its selector before it, unless the setting's first option has the selector's name."""
    selector, setting = selector_of(strategy), setting_of(strategy)
    return setting if setting.startswith(f"{selector}=") else f"{selector} {setting}"


def _laws(model: str, rows: Sequence[Row]) -> list[Section]:
    """Return the section that compares measured accuracies with the laws' predictions; none if no law is known."""
    known = [row for row in rows if "expected" in row.values and row.requests]
    if not known:
        return []
    lines = []
    for task in dict.fromkeys(row.cell.workload for row in known):
        own = [row for row in known if row.cell.workload == task]
        drawn = [deviation(row) for row in own if row.values["sigma"] > 1e-9]
        sure = [row for row in own if row.values["sigma"] <= 1e-9]
        inside = sum(abs(each) <= 3 for each in drawn) + sum(abs(deviation(row)) < 1e-6 for row in sure)
        worst = f"{max(map(abs, drawn)):.1f}" if drawn else "-"
        closed = TASKS[task].closed
        forms = [f"{closed(k):.3f} / {_measured(own, k)}" if closed else "-" for k in _COUNTS]
        lines.append((task, f"{inside} of {len(own)}", worst, *forms))
    head = ("task", "within 3 sigma", "largest, in sigma", *(f"k={k}" for k in _COUNTS))
    text = (
        "A law predicts the share of right answers: by a formula if k places are decided per step, or else by a sum of "
        "the probabilities of all right answers. Deciding one place per step is always right. The last columns show "
        "formula / measured for the selector that decides the k most certain places per step."
    )
    return [Section(f"{model}: against the laws, formula / measured", text, (Table(head, tuple(lines)),))]


def deviation(row: Row) -> float:
    """Return the measured share minus the expected one, in standard deviations.

    If the standard deviation is 0, the difference itself is returned.
    """
    gap = row.values["right"] / row.requests - row.values["expected"]
    return gap / row.values["sigma"] if row.values["sigma"] > 1e-9 else gap


def _measured(rows: Iterable[Row], k: int) -> str:
    """Return the share of right answers if the k most certain places are decided per step."""
    shares = [
        row.values["right"] / row.requests
        for row in rows
        if selector_of(row.cell.strategy) == "confidence" and setting_of(row.cell.strategy) == f"k={k}"
    ]
    return f"{shares[0]:.3f}" if shares else "-"


def _settings(model: str, rows: Sequence[Row]) -> Section:
    """Return the section with every setting: a table for each task, a line for each selector."""
    tables = []
    for task in dict.fromkeys(row.cell.workload for row in rows if row.requests):
        lines: dict[str, list[str]] = {}
        for row in rows:
            if row.cell.workload == task and row.requests:
                share = f"{row.values['right'] / row.requests:.0%} ({row.tokens_per_step:.2f})"
                lines.setdefault(selector_of(row.cell.strategy), []).append(f"{setting_of(row.cell.strategy)}: {share}")
        tables.append(Table(("selector", task), tuple((name, "; ".join(own)) for name, own in lines.items())))
    count = max((row.requests for row in rows), default=0)
    text = f"Right answers of {count}, and tokens per forward in brackets, by setting."
    return Section(f"{model}: every setting", text, tuple(tables))


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"
