"""Writes the report of files of results to a folder, as ``report.html`` and ``report.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parlay.bench.records import Row
from parlay.bench.report import acceptance, cells, cost, html, ideal, load, markdown, speed
from parlay.bench.report.pieces import Missing, Section
from parlay.bench.report.plots import Painter
from parlay.bench.report.sources import ReportSources, Source, gather

TITLE = "Parlay: what was measured"
PAGE, TABLES = "report.html", "report.md"


def write(paths: Sequence[Path], folder: Path, *, force: bool = False, plots: bool = True) -> tuple[Path, Path]:
    """The page and the tables made of these files. ``force`` lets different machines or versions into one report.

    Raises ValueError for files that can't be read or don't belong together, ParlayError where plots are wanted and
    matplotlib is missing.
    """
    gathered = gather(paths, force=force)
    painter = Painter() if plots else None
    parts = sections(gathered.rows)
    lines = origin(gathered)
    made = folder / PAGE, folder / TABLES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made[0].write_text(html.page(TITLE, lines, parts, painter), encoding="utf-8")
        made[1].write_text(markdown.page(TITLE, lines, parts), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"can't write the report to {folder}: {error.strerror}") from None
    return made


def sections(rows: Sequence[Row]) -> list[Section | Missing]:
    """All sections in order. A function returns None for a section that does not apply to these files."""
    found = (
        speed.steps_alone(rows),
        speed.by_workload(rows),
        acceptance.by_position(rows),
        cost.forwards(rows),
        load.by_concurrency(rows),
        ideal.against_ideal(rows),
        cost.bandwidth(rows),
        cells.every_cell(rows),
        cells.failures(rows),
    )
    return [section for section in found if section is not None]


def origin(gathered: ReportSources) -> list[str]:
    """Where the numbers come from: once where all files agree, and each command."""
    lines = [_machine(gathered.sources[0].header)]
    if gathered.differences:
        lines.append(f"*Put together by force*: {'; '.join(gathered.differences)}. Compare nothing across them.")
        lines += [f"{source.name}: {_machine(source.header)}" for source in gathered.sources[1:]]
    return lines + [_file(source) for source in gathered.sources]


def _file(source: Source) -> str:
    """Its command, its size, and how the model ran, where the header tells."""
    known = source.header
    ran = [str(known[name]) for name in ("dtype", "quantize", "device", "kernels") if known.get(name)]
    words = [
        f"`{known.get('command', 'no command')}`",
        str(known.get("date", "no date")),
        f"{len(source.rows)} rows",
        *ran,
    ]
    return f"{source.name}: {', '.join(words)}."


def _machine(header: Mapping[str, Any]) -> str:
    """One line on machine, versions and commit, as far as the header has them."""
    machine, versions, environment = (_mapping(header, name) for name in ("machine", "versions", "environment"))
    known = [
        machine.get("cpu"),
        f"{machine['cores']} cores ({machine.get('capability', '?')})" if "cores" in machine else None,
        f"{machine['memory_gib']} GiB" if "memory_gib" in machine else None,
        machine.get("accelerator"),
        machine.get("system"),
        f"threads: {header['threads']}" if "threads" in header else None,
        *(f"{name}={value}" for name, value in environment.items()),
        *(f"{name} {version}" for name, version in versions.items()),
        f"commit {header['commit']}" if "commit" in header else None,
    ]
    return ", ".join(str(each) for each in known if each) + "."


def _mapping(header: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = header.get(name)
    return value if isinstance(value, Mapping) else {}
