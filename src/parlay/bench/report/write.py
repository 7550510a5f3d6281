"""Writes a report on files of results to a folder, as ``report.md`` and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parlay.bench.host import BUSY_CORES
from parlay.bench.quality import page as quality
from parlay.bench.quality.run import PART
from parlay.bench.records import PLAIN, Row
from parlay.bench.report import plot
from parlay.bench.report.markdown import page
from parlay.bench.report.sources import ReportSources, Source, gather
from parlay.bench.report.tables import Conditions, ratios, sections

TITLE = "Parlay: what was measured"
PAGE, PLOT = "report.md", "speed.svg"


def write(paths: Sequence[Path], folder: Path, *, force: bool = False, plots: bool = True) -> list[Path]:
    """Write a page about these files, and a plot if something was timed. Returns the paths of the written files.

    If all rows are about quality, the page of `parlay.bench.quality` is written instead. ``force`` allows files of
    different machines. Raises ValueError for files that can't be read or do not belong together, and if the report
    can't be written. Raises ParlayError if ``plots`` are wanted and matplotlib is not installed.
    """
    gathered = gather(paths, force=force)
    if all(row.cell.part == PART for row in gathered.rows):
        return quality.write(gathered.rows, origin(gathered), folder, pictures=plots)
    if plots:
        plot.check()
    drawn = _drawn(gathered.rows) if plots else ""
    lines = origin(gathered) + ([f"![{TITLE}]({PLOT})"] if drawn else [])
    texts = {folder / PAGE: page(TITLE, lines, sections(gathered.rows))} | ({folder / PLOT: drawn} if drawn else {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"can't write the report to {folder}: {error.strerror}") from None
    return list(texts)


def _drawn(rows: Sequence[Row]) -> str:
    """Draw the plot of the first conditions in which strategies and plain decoding were timed; empty without any."""
    timed = [row for row in rows if row.tokens_per_second]
    for where in dict.fromkeys(map(Conditions.of, timed)):
        own = [row for row in timed if Conditions.of(row) == where]
        names = dict.fromkeys(str(row.cell.system) for row in own)
        found = {name: known for name in names if name != PLAIN and (known := ratios(own, name))}
        if found:
            return plot.dots(found, where.words)
    return ""


def origin(gathered: ReportSources) -> list[str]:
    """Return lines about the origin of the numbers: the machine, for each file if files differ, and each command."""
    lines = [_machine(gathered.sources[0].header)]
    if gathered.differences:
        lines.append(f"*Put together by force*: {'; '.join(gathered.differences)}. Compare nothing across them.")
        lines += [f"{source.name}: {_machine(source.header)}" for source in gathered.sources[1:]]
    return lines + [_file(source) for source in gathered.sources]


def _file(source: Source) -> str:
    """Describe a file: its command, date and number of rows, and how the model ran if the header says so."""
    known = source.header
    busy = known.get("busy_cores", 0.0)
    ran = [str(known[name]) for name in ("dtype", "quantize", "device", "kernels") if known.get(name)]
    words = [
        f"`{known.get('command', 'no command')}`",
        str(known.get("date", "no date")),
        f"{len(source.rows)} rows",
        *ran,
        *(
            [f"while {busy:.1f} cores were busy with other work"]
            if isinstance(busy, float) and busy > BUSY_CORES
            else []
        ),
    ]
    return f"{source.name}: {', '.join(words)}."


def _machine(header: Mapping[str, Any]) -> str:
    """Describe machine, versions and commit in one line, as far as the header has them."""
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
