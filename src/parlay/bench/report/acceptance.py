"""Acceptance by position: of the nodes proposed at each depth of a draft, the part that was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from parlay.bench.records import Row
from parlay.bench.report.numbers import decoded, only, systems, tokens_per_step, workloads
from parlay.bench.report.pieces import LineChart, Missing, Panel, Points, Section, Table

TITLE = "Acceptance by position"
TEXT = (
    "Accepted over proposed nodes, by how deep they stand in the draft, everything that was decoded together. The "
    "deeper, the fewer drafts reach there, and those that do were longer for a reason: a curve may rise. Of several "
    "nodes at one depth at most one is accepted. Positions with fewer than {fewest} proposals are left out."
)
FEWEST = 20
POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHOWN, PANELS = 8, 12
"""Most lines and panels of a chart."""


def by_position(rows: Sequence[Row]) -> Section | Missing:
    """A table over all workloads, and a panel for each."""
    own = [row for row in decoded(rows) if row.proposed]
    names = [name for name in systems(own) if points(only(own, name))]
    if not names:
        return Missing(TITLE, "no row counts what was proposed by position, at least not often enough")
    best = sorted(names, key=lambda name: -tokens_per_step(only(own, name)))[:SHOWN]
    every = (
        Panel(kind, {name: line for name in best if (line := points(only(own, name, kind)))}) for kind in workloads(own)
    )
    panels = [panel for panel in every if panel.lines]
    chart = LineChart(
        title=_chosen(len(names), len(panels)),
        x="position in the draft",
        y="accepted / proposed",
        panels=tuple(panels[:PANELS]),
        top=1.0,
    )
    shown = [chart] if panels else []  # there may be enough nodes over all workloads and too few in each
    return Section(TITLE, TEXT.format(fewest=FEWEST), (*shown, _table(own, names)))


def _chosen(names: int, panels: int) -> str:
    """A sentence on what the chart leaves out, if anything."""
    strategies = f"the {SHOWN} strategies with most tokens per step" if names > SHOWN else ""
    kinds = f"the first {PANELS} of {panels} workloads" if panels > PANELS else ""
    return "; ".join(filter(None, (strategies, kinds)))


def points(rows: Sequence[Row]) -> Points:
    """Position and acceptance, where enough was proposed."""
    proposed, accepted = (
        [sum(each) for each in zip_longest(*counts, fillvalue=0)]
        for counts in ([row.proposed_by_position for row in rows], [row.accepted_by_position for row in rows])
    )
    accepted += [0] * (len(proposed) - len(accepted))
    counts = enumerate(zip(proposed, accepted, strict=False), start=1)
    return [(position, taken / made) for position, (made, taken) in counts if made >= FEWEST]


def _table(rows: Sequence[Row], names: Sequence[str]) -> Table:
    lines = []
    for name in names:
        own = only(rows, name)
        at = dict(points(own))
        whole = sum(row.accepted for row in own) / sum(row.proposed for row in own)
        lines.append((name, f"{whole:.2f}", *(f"{at[place]:.2f}" if place in at else "" for place in POSITIONS)))
    return Table(("strategy", "all", *map(str, POSITIONS)), tuple(lines))
