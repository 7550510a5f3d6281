"""The parts of a report as data: sections with tables and charts, and sections that are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text, below a head; ``title`` may be empty."""

    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: lines by name."""

    title: str
    lines: Mapping[str, Points]


@dataclass(frozen=True, slots=True)
class LineChart:
    """Panels side by side that share their axes' meaning, and one legend. ``level`` draws a line across at a height."""

    title: str
    x: str
    y: str
    panels: tuple[Panel, ...]
    log_x: bool = False
    level: float | None = None
    top: float | None = None


@dataclass(frozen=True, slots=True)
class DotChart:
    """A line for each name: a dot for each kind, a bar across at their mean. Values are ratios; 1 is marked."""

    title: str
    x: str
    dots: Mapping[str, Mapping[str, float]]
    means: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScatterChart:
    """Named points against the diagonal."""

    title: str
    x: str
    y: str
    points: Mapping[str, Points]


Chart = LineChart | DotChart | ScatterChart


@dataclass(frozen=True, slots=True)
class Section:
    """A section: a few sentences, then charts and tables. A table below a chart may share its title."""

    title: str
    text: str
    parts: tuple[Table | Chart, ...]

    @property
    def tables(self) -> list[Table]:
        return [part for part in self.parts if isinstance(part, Table)]


@dataclass(frozen=True, slots=True)
class Missing:
    """A section that the files hold no data for, and why."""

    title: str
    why: str
