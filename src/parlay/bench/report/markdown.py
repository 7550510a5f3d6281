"""Tables and sections as Markdown, and the numbers in their cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.bench.summary import Spread


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text, below a head; ``title`` may be empty."""

    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A few sentences, then tables. Without tables ``text`` says why there are none."""

    title: str
    text: str
    tables: tuple[Table, ...] = ()


def page(title: str, origin: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole page; sections without tables are named at its end."""
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
    """The table alone."""
    rows = [table.head, ("---",) * len(table.head), *table.lines]
    return "\n".join("| " + " | ".join(map(escaped, row)) + " |" for row in rows)


def escaped(text: str) -> str:
    """Escape text for a cell of a table."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def spread(value: Spread | None, form: str) -> str:
    """The median, with lowest and highest in brackets where they differ; empty where nothing was measured."""
    if value is None:
        return ""
    middle, low, high = (format(number, form) for number in (value.median, value.low, value.high))
    return middle if low == high else f"{middle} ({low}-{high})"


def number(value: float | None, form: str, times: float = 1) -> str:
    """Empty where nothing was measured."""
    return "" if value is None else format(times * value, form)
