"""Families of models, from the table that the decoder reads."""

from __future__ import annotations

from parlay.models.families.listing import listing
from reference.markdown import code, table


def families() -> str:
    """One line for each architecture, by what runs it."""
    rows = [
        (code(row.architecture), row.models, row.runs_in, ", ".join(map(code, row.gguf)), _heads(row.heads), row.note)
        for row in listing()
    ]
    return table(["architecture", "models", "runs in", "in GGUF", "draft heads", "limits"], rows)


def _heads(heads: bool) -> str:
    return "yes" if heads else ""
