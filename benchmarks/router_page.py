"""Writes the Markdown page of `benchmarks.router`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, median
from typing import Any

from benchmarks.pages import HOW, about, failures, same, shown, table
from parlay.bench.records import PLAIN, Cell, Row
from parlay.bench.summary import Measurements

AUTO = "auto"
LEAST, MEAN, PLAINLY, SINGLE = 0.95, 0.98, 0.98, 1.25
"""Goals: the least share of the best strategy in a cell, the mean share, the least speed as a multiple of plain
decoding, and the mean speed as a multiple of the best single strategy."""
DIMENSIONS = ("model", "workload", "concurrency", "temperature", "context")


def report(header: Mapping[str, Any], rows: Sequence[Row], planned: int) -> str:
    """Write what was measured, the results over all cells and by value of each dimension, and a row for each cell."""
    found = Measurements(rows)
    names = [name for name in found.each(lambda cell: cell.strategy) if name not in (PLAIN, AUTO)]
    autos = [cell for cell in found.cells if cell.strategy == AUTO and _over_plain(found, cell) is not None]
    autos.sort(key=_values)
    lines = ["# `auto` against static strategies", "", about(header), "", _extent(header, found, autos, planned), ""]
    lines += [HOW, ""]
    if autos:
        lines += [*_verdicts(found, autos, names), *_by_value(found, autos, names)]
        head = (*DIMENSIONS, *(f"`{name}`" for name in (*names, AUTO)), "of the best")
        lines += ["## Cells", "", *table(head, [_line(found, cell, names) for cell in autos])]
    return "\n".join([*lines, *failures(found)])


def _values(cell: Cell) -> tuple[str, str, int, float, int]:
    return cell.model, cell.workload, cell.concurrency, cell.temperature, cell.context


def _extent(header: Mapping[str, Any], found: Measurements, autos: Sequence[Cell], planned: int) -> str:
    """Say which share of the cells was measured, how often, and with which strategies."""
    rounds = [len(found.of(cell)) for cell in autos] or [0]
    often = f"{min(rounds)}" if min(rounds) == max(rounds) else f"{min(rounds)} to {max(rounds)}"
    tried = sum(cell.strategy == AUTO for cell in found.cells)
    return (
        f"Measured: {len(autos)} of {planned} cells, rounds of each: {often}. {tried - len(autos)} more gave "
        f"nothing to time. SmolLM2's trained head: {header.get('head', 'not recorded')}. Texts equal to plain "
        f"decoding: {same(found.rows)}. The cells are the first of an order that holds each value of each dimension "
        "about equally often. With few rounds a single cell is uncertain by a tenth."
    )


def _line(found: Measurements, cell: Cell, names: Sequence[str]) -> Sequence[str]:
    """Return the row of one setting: every strategy's ratio to plain decoding, and `auto`'s ratio to the best of
    them."""
    ratios = [found.ratio(replace(cell, strategy=name), replace(cell, strategy=PLAIN)) for name in (*names, AUTO)]
    settings = (cell.model, cell.workload, str(cell.concurrency), f"{cell.temperature:g}", str(cell.context or "-"))
    return (*settings, *(shown(each) for each in ratios), f"{_of_best(found, cell, names):.2f}")


def _over_plain(found: Measurements, cell: Cell) -> float | None:
    ratio = found.ratio(cell, replace(cell, strategy=PLAIN))
    return None if ratio is None else ratio.median


def _speed(found: Measurements, cell: Cell, name: str) -> float:
    """Return a strategy's ratio to plain decoding; 1 if it does not run on a model."""
    return _over_plain(found, replace(cell, strategy=name)) or 1.0


def _of_best(found: Measurements, cell: Cell, names: Sequence[str]) -> float:
    """Return `auto`'s ratio to the best of the others, plain decoding included: median over median."""
    return _speed(found, cell, AUTO) / max([1.0, *(_speed(found, cell, name) for name in names)])


def _of_choice(found: Measurements, cell: Cell, names: Sequence[str]) -> float | None:
    """Return `auto`'s ratio to the strategy that was best in the other rounds; None with a single round.

    Where strategies differ by less than noise, the best in a round was mostly lucky. Choosing it by the other rounds
    takes this luck out. Plain decoding is among the strategies.
    """
    speeds = {name: _by_round(found, replace(cell, strategy=name)) for name in (PLAIN, *names)}
    own, ratios = _by_round(found, cell), []
    for here in own:
        others = {
            name: median(known)
            for name, rounds in speeds.items()
            if here in rounds and (known := [speed for number, speed in rounds.items() if number != here])
        }
        if others:
            best = max(others, key=lambda name: others[name])
            ratios.append(own[here] / speeds[best][here])
    return geometric_mean(ratios) if ratios else None


def _by_round(found: Measurements, cell: Cell) -> dict[int, float]:
    """Return decoded tokens per second in each round that was timed."""
    return {row.round: row.decode_tokens / row.decode_seconds for row in found.of(cell) if row.decode_seconds}


def _verdicts(found: Measurements, autos: Sequence[Cell], names: Sequence[str]) -> list[str]:
    shares = [_of_best(found, cell, names) for cell in autos]
    over_plain = [_speed(found, cell, AUTO) for cell in autos]
    single = {name: geometric_mean(_speed(found, cell, name) for cell in autos) for name in (PLAIN, *names)}
    best = max(single, key=lambda name: single[name])
    mean = geometric_mean(over_plain)
    chosen = [share for cell in autos if (share := _of_choice(found, cell, names)) is not None]
    return [
        f"Of the best in hindsight: {geometric_mean(shares):.2f} in geometric mean ({MEAN:g} was the goal), "
        f"{min(shares):.2f} in the least cell ({LEAST:g}).{_without_luck(chosen)}",
        "",
        f"Over plain decoding: {mean:.2f} in geometric mean, {min(over_plain):.2f} in the least cell ({PLAINLY:g}).",
        "",
        f"The best single strategy, `{best}`: {single[best]:.2f}. `auto` over it: {mean / single[best]:.2f} in "
        f"geometric mean ({SINGLE:g} was the goal). A strategy that does not run on a model counts "
        "there as plain decoding.",
        "",
    ]


def _without_luck(chosen: Sequence[float]) -> str:
    """Return a sentence with `auto`'s ratios to the strategy that the other rounds chose."""
    if not chosen:
        return ""
    return (
        f" Of what was best in the other rounds, so that luck has no part in the choice: {geometric_mean(chosen):.2f}, "
        f"least {min(chosen):.2f}."
    )


def _by_value(found: Measurements, autos: Sequence[Cell], names: Sequence[str]) -> list[str]:
    """Write a table by value of each dimension, so that a value with other results stands out."""
    lines = []
    for place, dimension in enumerate(DIMENSIONS):
        for value in sorted({_values(cell)[place] for cell in autos}, key=str):
            own = [cell for cell in autos if _values(cell)[place] == value]
            shares = [_of_best(found, cell, names) for cell in own]
            plainly = [_speed(found, cell, AUTO) for cell in own]
            means = (f"{geometric_mean(shares):.2f}", f"{min(shares):.2f}", f"{geometric_mean(plainly):.2f}")
            lines.append((dimension, str(value), str(len(own)), *means))
    head = ("dimension", "value", "cells", "of the best", "least", "over plain")
    return ["## By dimension", "", *table(head, lines)]
