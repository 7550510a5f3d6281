"""Charts as SVG, by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from parlay.bench.report.pieces import Chart, DotChart, LineChart, Panel, ScatterChart
from parlay.types import ParlayError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
WIDTH = 9.6
"""Inches; at most so many panels stand side by side in it."""
LEGEND_BESIDE = 3.6
PALETTE = (
    *("#1f6fb4", "#d95f02", "#1b9e77", "#c2378a", "#7b5ea7", "#8a6d00", "#4d4d4d", "#d7301f"),
    *("#00868b", "#66a61e", "#6a51a3", "#a6611a"),
)
MARKERS = "osD^vPX*"
SETTINGS: Mapping[str, object] = {
    "svg.hashsalt": "parlay",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


class Painter:
    """Draws charts. A name keeps its colour and its mark in all of them."""

    def __init__(self) -> None:
        """Raises ParlayError where matplotlib is missing."""
        try:
            import matplotlib  # noqa: F401  # here, because it is an extra
        except ImportError as error:
            raise ParlayError(f"plots need {error.name}: pip install 'parlay[plot]', or --no-plots") from None
        self._names: dict[str, int] = {}

    def svg(self, chart: Chart) -> str:
        """The chart as one SVG element."""
        with _figure(_size(chart)) as figure:
            if isinstance(chart, LineChart):
                self._lines(figure, chart)
            elif isinstance(chart, DotChart):
                self._dots(figure, chart)
            else:
                self._scatter(figure, chart)
            return _svg(figure)

    def _style(self, name: str) -> tuple[str, str]:
        """Colour and mark."""
        number = self._names.setdefault(name, len(self._names))
        return PALETTE[number % len(PALETTE)], MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]

    def _lines(self, figure: Figure, chart: LineChart) -> None:
        columns = min(COLUMNS, len(chart.panels))
        rows = -(-len(chart.panels) // columns)
        grid = figure.subplots(rows, columns, squeeze=False)
        places = [axes for line in grid for axes in line]
        for place, (axes, panel) in enumerate(zip(places, chart.panels, strict=False)):
            self._panel(axes, chart, panel)
            axes.set_ylabel(chart.y if place % columns == 0 else "")
            axes.set_xlabel(chart.x if place + columns >= len(chart.panels) else "")
        for axes in places[len(chart.panels) :]:
            axes.set_visible(False)
        names = list(dict.fromkeys(name for panel in chart.panels for name in panel.lines))
        self._legend(figure, names, line="-")

    def _panel(self, axes: Axes, chart: LineChart, panel: Panel) -> None:
        for name, points in panel.lines.items():
            colour, mark = self._style(name)
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, color=colour, marker=mark, markersize=3.5, linewidth=1.4)
        if chart.log_x:
            _powers_of_two(axes, [x for points in panel.lines.values() for x, _ in points])
        if chart.level is not None:
            axes.axhline(chart.level, color="#888888", linewidth=0.8, linestyle="--")
        axes.set_ylim(0, chart.top)
        axes.set_title(_shortened(panel.title))

    def _dots(self, figure: Figure, chart: DotChart) -> None:
        axes = figure.subplots()
        names = list(chart.dots)
        axes.barh(range(len(names)), [chart.means[name] for name in names], height=0.62, color="#dfe5ea")
        kinds = list(dict.fromkeys(kind for dots in chart.dots.values() for kind in dots))
        for kind in kinds:
            colour, mark = self._style(kind)
            points = [(dots[kind], place) for place, dots in enumerate(chart.dots.values()) if kind in dots]
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, color=colour, marker=mark, s=22, linewidths=0, zorder=3)
        axes.set_yticks(range(len(names)), list(map(_shortened, names)))
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.axvline(1, color="#888888", linewidth=0.8, linestyle="--")
        axes.set_xlabel(chart.x)
        self._legend(figure, kinds, line="")

    def _scatter(self, figure: Figure, chart: ScatterChart) -> None:
        axes = figure.subplots()
        for name, points in chart.points.items():
            colour, mark = self._style(name)
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, color=colour, marker=mark, s=26, linewidths=0, zorder=3)
        ends = [value for points in chart.points.values() for point in points for value in point]
        low, high = min(*ends, 1.0) * 0.9, max(*ends, 1.0) * 1.1
        axes.plot([low, high], [low, high], color="#888888", linewidth=0.8, linestyle="--")
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_xlabel(chart.x)
        axes.set_ylabel(chart.y)
        self._legend(figure, list(chart.points), line="", beside=True)

    def _legend(self, figure: Figure, names: Sequence[str], line: str, *, beside: bool = False) -> None:
        """Below everything, or beside it, so that it covers nothing."""
        from matplotlib.lines import Line2D

        handles = []
        for name in names:
            colour, mark = self._style(name)
            handles.append(
                Line2D([], [], color=colour, marker=mark, markersize=5.5, linestyle=line, label=_shortened(name))
            )
        columns = 1 if beside else _legend_columns(names, figure.get_figwidth())
        place = "outside right upper" if beside else "outside lower center"
        figure.legend(handles=handles, loc=place, ncols=columns)


def _size(chart: Chart) -> tuple[float, float]:
    """Inches, the legend's lines included."""
    if isinstance(chart, LineChart):
        columns = min(COLUMNS, len(chart.panels))
        names = {name for panel in chart.panels for name in panel.lines}
        width, height = max(4.8, WIDTH * columns / COLUMNS), 2.6 * -(-len(chart.panels) // columns)
        return width, height + _legend_height(names, width)
    if isinstance(chart, DotChart):
        kinds = {kind for dots in chart.dots.values() for kind in dots}
        return WIDTH, 0.8 + 0.27 * len(chart.dots) + _legend_height(kinds, WIDTH)
    return WIDTH, WIDTH - LEGEND_BESIDE  # about square, the legend left out


def _legend_columns(names: Collection[str], width: float) -> int:
    """As many as fit."""
    longest = max(len(_shortened(name)) for name in names)
    return max(1, min(len(names), int(width / (0.55 + 0.075 * longest))))


def _legend_height(names: Collection[str], width: float) -> float:
    return 0.3 + 0.2 * math.ceil(len(names) / _legend_columns(names, width))


def _powers_of_two(axes: Axes, xs: Sequence[float]) -> None:
    """A logarithmic axis whose labels are plain numbers."""
    axes.set_xscale("log", base=2)
    low, high = math.floor(math.log2(min(xs))), math.ceil(math.log2(max(xs)))
    ticks = [2**power for power in range(low, high + 1)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _shortened(title: str, most: int = 36) -> str:
    return title if len(title) <= most else f"{title[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


@contextmanager
def _figure(size: tuple[float, float]) -> Iterator[Figure]:
    """A figure in the report's style; matplotlib's global settings are not changed."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(dict(SETTINGS)):
        yield Figure(figsize=size, layout="constrained")


def _svg(figure: Figure) -> str:
    """One element, the same for the same chart: no date, no XML head."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :].strip()
