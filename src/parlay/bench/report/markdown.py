"""The report as Markdown: the same sections and tables, without charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parlay.bench.report.pieces import Missing, Section, Table


def page(title: str, origin: Sequence[str], sections: Sequence[Section | Missing]) -> str:
    """The whole page."""
    parts = [f"# {title}", *origin]
    for section in sections:
        if isinstance(section, Section):
            parts += [f"## {section.title}", *([section.text] if section.text else [])]
            parts += [part for table in section.tables for part in (*_title(table), markdown(table))]
    missing = [f"- {each.title}: {each.why}." for each in sections if isinstance(each, Missing)]
    parts += ["## Not measured", "\n".join(missing)] if missing else []
    return "\n\n".join(parts) + "\n"


def _title(table: Table) -> Iterator[str]:
    if table.title:
        yield f"**{escaped(table.title)}**"


def markdown(table: Table) -> str:
    """The table alone."""
    rows = [table.head, ("---",) * len(table.head), *table.lines]
    return "\n".join("| " + " | ".join(map(escaped, row)) + " |" for row in rows)


def escaped(text: str) -> str:
    """Text that can stand in a cell of a table."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
