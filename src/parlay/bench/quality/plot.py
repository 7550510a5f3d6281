"""Draws plots of accuracy against tokens per forward, with a line for each selector. They need matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from parlay.bench.quality.curves import Curve
from parlay.bench.quality.run import EXACT, SWEEP

INK, GRID = "#7d8590", "#7d859040"
"""Greys that can be read on white and on dark pages."""
_COLOURS = (
    *("#0f9d8f", "#4493f8", "#d29922", "#a371f7", "#e5534b", "#57ab5a"),
    *("#c96198", "#7c5cd6", "#ae7c14", "#6cb6ff", "#b35900"),
)
_MARKS = "osD^v<>PXhd"
_STYLE = {
    "svg.hashsalt": "parlay",
    "svg.fonttype": "path",
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
_COLUMNS = 2

Curves = Mapping[str, Curve]
"""Curves by the name of their line."""


def panels(each: Mapping[str, Curves]) -> str:
    """Draw a panel for each title, as one SVG. Panels share the legend and the axes. Equal numbers give equal SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for curves in each.values() for name in curves))
    columns = min(_COLUMNS, len(each))
    down = math.ceil(len(each) / columns)
    with matplotlib.rc_context(dict(_STYLE)):
        figure = Figure(figsize=(5.6, 1.2 + (1.7 if columns > 1 else 3.0) * down), layout="constrained")
        axes = figure.subplots(down, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for title, curves, panel in zip(each, each.values(), axes, strict=False):
            _panel(panel, title, curves, names)
        for panel in axes[len(each) :]:
            panel.set_visible(False)
        figure.supxlabel("tokens per forward", fontsize=10)
        figure.supylabel("right answers", fontsize=10)
        handles = [_line(axes[0], name, names, [], []) for name in names]
        figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    whole = text.getvalue()
    return whole[whole.index("<svg") :].strip() + "\n"


def _panel(axes: Any, title: str, curves: Curves, names: Sequence[str]) -> None:
    for name, curve in curves.items():
        _line(axes, name, names, [one.tokens_per_forward for one in curve], [one.accuracy for one in curve])
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(-0.04, 1.04)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, zorder=0)


def _line(axes: Any, name: str, names: Sequence[str], x: Sequence[float], y: Sequence[float]) -> Any:
    """Draw a line. A selector has the same colour and mark in all plots."""
    number = list(SWEEP).index(name) if name in SWEEP else names.index(name)
    exact = name == EXACT or name.endswith(f" {EXACT}")
    look = {"color": INK, "marker": "*"} if exact else {"color": _COLOURS[number % 11], "marker": _MARKS[number % 11]}
    (line,) = axes.plot(x, y, label=name, linewidth=1.2, markersize=7 if exact else 4, zorder=3 if exact else 2, **look)
    return line
