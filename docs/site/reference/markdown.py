"""Markdown that several generators write, and the meanings that the package does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

MEANINGS = Path(__file__).parent / "meanings.yml"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a bar within a cell is escaped."""
    lines = [_row(heads), _row(["---"] * len(heads)), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def code(text: object) -> str:
    """As code, or nothing for an empty text."""
    return f"`{text}`" if str(text) else ""


@cache
def meanings() -> dict[str, Any]:
    """What parameters, fields and addresses mean, by group and name."""
    found: dict[str, Any] = yaml.safe_load(MEANINGS.read_text(encoding="utf-8"))
    return found


def meaning(group: str, name: str, *others: str) -> str:
    """The meaning of ``name`` in the first of the groups that has it. Raises KeyError where none has."""
    for each in (group, *others):
        if name in meanings().get(each, {}):
            return str(meanings()[each][name])
    raise KeyError(f"{MEANINGS.name} says nothing of {name} under {' or '.join((group, *others))}")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
