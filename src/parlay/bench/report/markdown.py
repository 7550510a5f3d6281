"""Formats tables, sections and numbers as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.bench.summary import Spread


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts: the head and the lines below it. ``title`` may be empty."""

    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page: some sentences, then tables. If there are no tables, ``text`` says why."""

    title: str
    text: str
    tables: tuple[Table, ...] = ()


def page(title: str, origin: Sequence[str], sections: Sequence[Section]) -> str:
    """Return the whole page. Sections without tables are listed at its end."""
    parts = [f"# {title}", *origin]
    for section in sections:
        if section.tables:
            parts += [f"## {section.title}", *([section.text] if section.text else [])]
            for table in section.tables:
                parts += [f"**{escaped(table.title)}**"] if table.title else []
                parts.append(markdown(table))
    missing = [f"- {each.title}: {each.text}." for each in sections if not each.tables]
    parts += ["## Not measured", "\n".join(missing)] if missing else []
    return "\n\n".join(parts) + "\n"


def markdown(table: Table) -> str:
    """Return the table without its title."""
    rows = [table.head, ("---",) * len(table.head), *table.lines]
    return "\n".join("| " + " | ".join(map(escaped, row)) + " |" for row in rows)


def escaped(text: str) -> str:
    """Return the text, escaped for a cell of a table and in one line."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def spread(value: Spread | None, form: str) -> str:
    """Return the median, with the lowest and highest value in brackets if they differ; empty without a value."""
    if value is None:
        return ""
    middle, low, high = (format(number, form) for number in (value.median, value.low, value.high))
    return middle if low == high else f"{middle} ({low}-{high})"


def bounds(low: float, high: float) -> str:
    """Return an interval of ratios as text. An upper bound beyond 99 says only that there are too few prompts."""
    return f"{low:.2f}-99+" if high > 99 else f"{low:.2f}-{high:.2f}"


def number(value: float | None, form: str, times: float = 1) -> str:
    """Return ``times`` times the value as text; empty without a value."""
    return "" if value is None else format(times * value, form)
