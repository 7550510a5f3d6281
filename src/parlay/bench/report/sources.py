"""Reads files of results together: rows of one machine and one version, unless forced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay.bench.records import Row, read

ORIGIN = ("machine", "versions", "commit", "threads", "environment")
"""The fields of provenance that files in one report must share; what was measured may differ."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its name, where it comes from, and its rows."""

    name: str
    header: Mapping[str, Any]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class ReportSources:
    """All files, and the differences between those that were forced together."""

    sources: tuple[Source, ...]
    differences: tuple[str, ...] = ()

    @property
    def rows(self) -> list[Row]:
        return [row for source in self.sources for row in source.rows]


def gather(paths: Sequence[Path], *, force: bool = False) -> ReportSources:
    """Read the files. ``force`` lets results of different machines or versions into one report.

    Raises ValueError for a file that can't be read, has no rows, or is named twice, and for files that don't belong
    together.
    """
    repeated = [path for number, path in enumerate(paths) if path in paths[:number]]
    if repeated:
        raise ValueError(f"{repeated[0]} is named twice")
    sources = tuple(_source(path) for path in paths)
    first = sources[0]
    compared = ((other.name, _differing(first, other)) for other in sources[1:])
    differences = tuple(f"{name} differs from {first.name} in {fields}" for name, fields in compared if fields)
    if differences and not force:
        raise ValueError(
            f"results of different machines or versions in one report: {'; '.join(differences)}: report each alone, or "
            "--force"
        )
    return ReportSources(sources, differences)


def _source(path: Path) -> Source:
    header, rows = read(path)
    if not rows:
        raise ValueError(f"{path} holds no rows: nothing was measured")
    return Source(path.name, header, tuple(rows))


def _differing(one: Source, other: Source) -> str:
    """The fields of `ORIGIN` in which two files differ."""
    return ", ".join(name for name in ORIGIN if one.header.get(name) != other.header.get(name))
