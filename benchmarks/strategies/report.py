"""Tables made of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.figures import summary
from benchmarks.figures.ours import PLAIN
from benchmarks.figures.results import Row

EXPLAIN = 0.15
"""A gap between ideal and measured speed that is to be explained."""


def report(header: dict[str, object], rows: Sequence[Row]) -> str:
    """Markdown."""
    parts = [heading(header), *replay_tables(rows)]
    for model in dict.fromkeys(row.model for row in rows if row.part == "speed"):
        parts += speed_tables(model, [row for row in rows if row.part == "speed" and row.model == model])
    return "\n\n".join(parts) + "\n"


def heading(header: dict[str, object]) -> str:
    """Where the numbers come from."""
    machine = header["machine"]
    assert isinstance(machine, dict)
    origin = f"{machine['cpu']}, {machine['cores']} cores; commit {header['commit']}, {header['date']}"
    return f"# Strategies on real text\n\n{origin}\n\n    {header.get('command', '')}"


def replay_tables(rows: Sequence[Row]) -> list[str]:
    """Tokens per step, and what proposing took."""
    own = [row for row in rows if row.part == "replay"]
    if not own:
        return []
    kinds = list(dict.fromkeys(row.kind for row in own))
    by_cell = {(row.system, row.kind): row for row in own}
    lines = [table_head(["strategy", *kinds, "us of drafting a step"])]
    for system in dict.fromkeys(row.system for row in own):
        cells = [by_cell.get((system, kind)) for kind in kinds]
        slowest = max((cell.values or {}).get("propose_us", 0.0) for cell in cells if cell)
        lines.append(line([f"`{system}`", *(replay_cell(cell) for cell in cells), f"{slowest:.0f}"]))
    title = "## Tokens per step on recorded answers\n\n" + (
        "Exact for those texts: the drafters here don't look at the target. Every text came out as recorded, unless a "
        "cell says otherwise. Tokens are those of the built-in tokenizer."
    )
    return [title + "\n\n" + "\n".join(lines)]


def replay_cell(row: Row | None) -> str:
    """Tokens per step."""
    if row is None:
        return ""
    if row.error:
        return row.error
    return f"{row.tokens / row.steps:.2f}" + ("" if row.same else " (text differs)")


def speed_tables(model: str, rows: Sequence[Row]) -> list[str]:
    """Tokens per step and speed by kind; then measured against ideal."""
    kinds = summary.kinds(rows)
    systems = list(dict.fromkeys(row.system for row in rows))
    speed = [table_head(["strategy", *kinds, "geometric mean", "same text"])]
    for system in systems:
        own = [row for row in rows if row.system == system]
        failed = next((row.error for row in own if row.error), "")
        cells = [cell(rows, own, system, kind) for kind in kinds]
        mean = summary.geometric_ratio(rows, system, PLAIN)
        speed.append(line([f"`{system}`", *cells, failed or str(mean or ""), summary.same(own)]))
    return [
        f"## Speed against plain decoding: {model}\n\nTimes `{PLAIN}`, tokens per step in brackets.\n\n"
        + "\n".join(speed),
        f"## Measured against the formula: {model}\n\n" + gap_table(rows),
    ]


def gap_table(rows: Sequence[Row]) -> str:
    """Measured speed against ideal, all kinds of text together."""
    lines = [table_head(["strategy", "tokens per step", "rows", "measured", "ideal", "measured / ideal"])]
    for system in dict.fromkeys(row.system for row in summary.timed(rows)):
        if system != PLAIN:
            lines.append(line(gap_cells(rows, [row for row in rows if row.system == system], system)))
    return "\n".join(lines)


def cell(rows: Sequence[Row], own: Sequence[Row], system: str, kind: str) -> str:
    """Speed, and tokens per step."""
    here = [row for row in rows if row.kind == kind]
    ratio = summary.ratio(here, system, PLAIN)
    steps = summary.tokens_per_step([row for row in own if row.kind == kind])
    return f"{ratio.middle:.2f} ({steps:.1f})" if ratio else ""


def gap_cells(rows: Sequence[Row], own: Sequence[Row], system: str) -> list[str]:
    """All kinds of text together."""
    plain = summary.timed(row for row in rows if row.system == PLAIN)
    mine = summary.timed(own)
    measured = summary.rate(mine) / summary.rate(plain)
    ideal = ideal_rate(mine) / ideal_rate(plain)
    share = measured / ideal
    mark = "" if abs(share - 1) <= EXPLAIN else " (*)"
    drafting = [row for row in mine if row.draft_tokens]
    rows_each = sum((row.values or {}).get("rows", 1.0) for row in drafting) / max(1, len(drafting))
    steps = summary.tokens_per_step(mine)
    return [f"`{system}`", f"{steps:.2f}", f"{rows_each:.1f}", f"{measured:.2f}", f"{ideal:.2f}", f"{share:.2f}{mark}"]


def ideal_rate(rows: Iterable[Row]) -> float:
    """Decoded tokens per ideal second."""
    chosen = [row for row in rows if row.values]
    return sum(row.decode_tokens for row in chosen) / sum((row.values or {})["ideal_seconds"] for row in chosen)


def table_head(names: Sequence[str]) -> str:
    """The first two lines of a table."""
    return line(names) + "\n" + line(["---"] * len(names))


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |"
