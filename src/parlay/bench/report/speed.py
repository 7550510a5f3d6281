"""Speed by workload and strategy, and tokens per step where nothing was timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parlay.bench.records import PLAIN, Row
from parlay.bench.report.numbers import (
    all_conditions,
    conditions_of,
    decoded,
    geometric,
    only,
    ratio,
    same,
    speed,
    systems,
    timed,
    tokens_per_step,
    workloads,
)
from parlay.bench.report.pieces import Chart, DotChart, Missing, Section, Table

TITLE = "Speed by workload and strategy"
TEXT = (
    "Times as fast as plain decoding of the same requests, the median of the rounds, each ratio taken within a round; "
    "in brackets tokens per step. The mean is geometric, over the workloads that both decoded. Bars are means, dots "
    "are workloads."
)
RECORDED = "Tokens per step on recorded answers"
RECORDED_TEXT = (
    "Steps are counted, and nothing is timed: no model was there but its recorded answers. For these texts the numbers "
    "are exact, since the strategies here look at nothing but the text. The mean is geometric, over the workloads."
)


def by_workload(rows: Sequence[Row]) -> Section | Missing:
    """Ratios against plain decoding: a table and a chart for all conditions in which something was timed."""
    parts: list[Table | Chart] = []
    for where in all_conditions(timed(rows)):
        own = [row for row in decoded(rows) if conditions_of(row) == where]
        chart = _chart(own)
        parts += [chart, _table(own)] if chart.dots else [_table(own)]
    return Section(TITLE, TEXT, tuple(parts)) if parts else Missing(TITLE, "no row holds a speed")


def _table(rows: Sequence[Row]) -> Table:
    kinds, names = workloads(rows), systems(rows)
    head = ("strategy", "mean", *kinds, "tokens/s", "same text")
    lines = [
        (
            name,
            _mean(_ratios(rows, name), kinds),
            *(_cell(rows, name, kind) for kind in kinds),
            _rate(rows, name),
            same(only(rows, name)),
        )
        for name in sorted(names, key=lambda name: (-_geometric(rows, name), names.index(name)))
    ]
    return Table(head, tuple(lines), conditions_of(rows[0]).words)


def _cell(rows: Sequence[Row], name: str, kind: str) -> str:
    own = only(rows, name, kind)
    if own and not any(row.tokens for row in own):
        return "no tokens"
    value, steps = ratio(rows, name, kind), tokens_per_step(own)
    if value is None:
        return ""
    return f"{value.median:.2f}" + (f" ({steps:.1f})" if steps else "")


def _ratios(rows: Sequence[Row], name: str) -> dict[str, float]:
    """The ratio on each workload that has one."""
    found = ((kind, ratio(rows, name, kind)) for kind in workloads(rows))
    return {kind: value.median for kind, value in found if value is not None}


def _geometric(rows: Sequence[Row], name: str) -> float:
    return geometric([*_ratios(rows, name).values()])


def _mean(values: Mapping[str, float], kinds: Sequence[str]) -> str:
    """The geometric mean, and over how many workloads it is, if not over all."""
    if not values:
        return ""
    some = f" ({len(values)} of {len(kinds)})" if len(values) < len(kinds) else ""
    return f"{geometric([*values.values()]):.2f}{some}"


def _rate(rows: Sequence[Row], name: str) -> str:
    """Geometric mean over workloads."""
    rates = [value for kind in workloads(rows) if (value := speed(only(rows, name, kind)))]
    return f"{geometric(rates):.1f}" if rates else ""


def _chart(rows: Sequence[Row]) -> DotChart:
    names = [name for name in systems(rows) if name != PLAIN and _ratios(rows, name)]
    names.sort(key=lambda name: _geometric(rows, name))
    return DotChart(
        title=conditions_of(rows[0]).words,
        x="times as fast as plain decoding",
        dots={name: _ratios(rows, name) for name in names},
        means={name: _geometric(rows, name) for name in names},
    )


def steps_alone(rows: Sequence[Row]) -> Section | None:
    """Tokens per step of rows without a time; None without such rows."""
    own = [row for row in decoded(rows) if row.steps and row not in timed([row])]
    if not own:
        return None
    parts: list[Table | Chart] = []
    for where in all_conditions(own):
        here = [row for row in own if conditions_of(row) == where]
        parts += [_steps_chart(here), _steps_table(here)]
    return Section(RECORDED, RECORDED_TEXT, tuple(parts))


def _steps(rows: Sequence[Row], name: str) -> dict[str, float]:
    found = ((kind, tokens_per_step(only(rows, name, kind))) for kind in workloads(rows))
    return {kind: value for kind, value in found if value}


def _steps_table(rows: Sequence[Row]) -> Table:
    kinds = workloads(rows)
    steps = {name: _steps(rows, name) for name in systems(rows)}
    order = sorted(steps, key=lambda name: -geometric([*steps[name].values()]))
    lines = [
        (
            name,
            _mean(steps[name], kinds),
            *(f"{steps[name][kind]:.2f}" if kind in steps[name] else "" for kind in kinds),
            same(only(rows, name)),
        )
        for name in order
    ]
    return Table(("strategy", "mean", *kinds, "same text"), tuple(lines), conditions_of(rows[0]).words)


def _steps_chart(rows: Sequence[Row]) -> DotChart:
    steps = {name: _steps(rows, name) for name in systems(rows) if name != PLAIN}
    means = {name: geometric([*values.values()]) for name, values in steps.items()}
    order = sorted(steps, key=lambda name: means[name])
    return DotChart(
        conditions_of(rows[0]).words,
        "tokens per step (plain decoding: 1)",
        {name: steps[name] for name in order},
        {name: means[name] for name in order},
    )
