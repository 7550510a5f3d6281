"""Reads several files of results for one report, and refuses files of different machines or versions unless forced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from parlay.bench.records import Row, read

ORIGIN = ("machine", "versions", "commit", "threads", "environment")
"""The provenance fields that all files in one report must share."""
CONDITIONS = ("dtype", "quantize", "device", "kernels", "options", "settings", "tokenizer")
"""Further fields that two files must share if they hold rows of the same cells."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of results: its name, its provenance record, and its rows."""

    name: str
    header: Mapping[str, Any]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class ReportSources:
    """All files of a report, and the differences between them if they were forced together."""

    sources: tuple[Source, ...]
    differences: tuple[str, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """All rows. Each file's rounds get numbers after the last file's, so that no ratio mixes two files."""
        found: list[Row] = []
        for source in self.sources:
            start = max((row.round for row in found), default=-1) + 1
            found += [replace(row, round=start + row.round) for row in source.rows]
        return found


def gather(paths: Sequence[Path], *, force: bool = False) -> ReportSources:
    """Read the files. ``force`` allows results of different machines or versions in one report.

    Raises ValueError for a file that can't be read, has no rows, or is named twice. Without ``force``, it also raises
    ValueError for files of different origins.
    """
    repeated = [path for number, path in enumerate(paths) if path in paths[:number]]
    if repeated:
        raise ValueError(f"{repeated[0]} is named twice")
    sources = tuple(_source(path) for path in paths)
    differences = tuple(_differences(sources))
    if differences and not force:
        raise ValueError(
            f"results of different machines, versions or settings in one report: {'; '.join(differences)}: report each "
            "alone, or --force"
        )
    return ReportSources(sources, differences)


def _source(path: Path) -> Source:
    header, rows = read(path)
    if not rows:
        raise ValueError(f"{path} holds no rows: nothing was measured")
    return Source(path.name, header, tuple(rows))


def _differences(sources: Sequence[Source]) -> Iterator[str]:
    """Yield the forbidden differences between files.

    Each file must agree with the first one in `ORIGIN`, and with any file that has the same cells in `CONDITIONS`.
    """
    for one, other in combinations(sources, 2):
        shared = {row.cell for row in one.rows} & {row.cell for row in other.rows}
        fields = [*(ORIGIN if one is sources[0] else ()), *(CONDITIONS if shared else ())]
        if names := [name for name in fields if one.header.get(name) != other.header.get(name)]:
            yield f"{other.name} differs from {one.name} in {', '.join(names)}"
