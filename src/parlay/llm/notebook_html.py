"""Shows results in notebooks: the text with its runs coloured by source, and its steps as bars."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from parlay.types import TARGET

S = TypeVar("S")
_COLOURS = ("#2a9d8f", "#c77dff", "#e9a23b", "#4c8dff", "#e76f51", "#7cb518")
"""Colours of drafters, in order of appearance; readable on light and dark backgrounds."""
_OWN = "#8a8f98"
_MOST_STEPS = 160
_BAR, _CELL, _HEIGHT = 5, 5, 80


def shown(
    text: str, ends: Sequence[int], sources: Sequence[str], heading: str, facts: str, *, writers: Sequence[str] = ()
) -> str:
    """One sample as HTML. ``ends``: the length of the text up to each token. ``sources``: each token's source.

    If there are ``writers``, the text is coloured by them, and the bars of its steps are not.
    """
    named = writers or sources
    colours = _colours(named)
    body = "".join(_run(part, name, colours) for part, name in runs(text, ends, named))
    return (
        '<div style="max-width:60em;margin:.5em 0">'
        f'<div style="opacity:.7;white-space:pre-wrap">{html.escape(heading)}</div>'
        f'<div style="white-space:pre-wrap;margin:.4em 0">{body}</div>'
        f"{_picture(sources, {} if writers else colours)}"
        f'<div style="opacity:.7;font-size:90%">{_legend(named, colours)}{html.escape(facts)}</div></div>'
    )


def steps(sources: Sequence[str]) -> list[list[str]]:
    """The sources of each step's tokens. A step ends with the token that the target wrote itself."""
    found: list[list[str]] = [[]]
    for source in sources:
        found[-1].append(source)
        if source == TARGET:
            found.append([])
    return [step for step in found if step]


def _colours(sources: Sequence[str]) -> dict[str, str]:
    drafters = [source for source in dict.fromkeys(sources) if source != TARGET]
    return {source: _COLOURS[place % len(_COLOURS)] for place, source in enumerate(drafters)}


def runs(text: str, ends: Sequence[int], sources: Sequence[S]) -> Iterator[tuple[str, S]]:
    """Runs of the text whose tokens have one source. A token that ends within a character adds no text yet."""
    begin = 0
    for source, run in groupby(zip(ends, sources, strict=False), key=lambda pair: pair[1]):
        *_, (end, _) = run
        if text[begin:end]:
            yield text[begin:end], source
        begin = max(begin, end)


def _run(part: str, source: str, colours: dict[str, str]) -> str:
    if source == TARGET:
        return html.escape(part)
    style = f"background:{colours[source]}40;border-radius:3px"
    return f'<span style="{style}" title="{html.escape(source, quote=True)}">{html.escape(part)}</span>'


def _picture(sources: Sequence[str], colours: dict[str, str]) -> str:
    """One bar per step, one cell per token: drafted tokens below, the target's own on top."""
    every = steps(sources)
    columns = every[:_MOST_STEPS]
    if not columns:
        return ""
    cell = min(_CELL, _HEIGHT / max(map(len, columns)))
    width, height = _BAR * len(columns), cell * max(map(len, columns))
    cells = "".join(
        f'<rect x="{_BAR * place}" y="{height - cell * (row + 1):.1f}" width="{_BAR - 1}" '
        f'height="{max(cell - 0.6, 0.4):.1f}" fill="{colours.get(source, _OWN)}"/>'
        for place, column in enumerate(columns)
        for row, source in enumerate(column)
    )
    more = f" (the first {len(columns)} of {len(every)})" if len(every) > len(columns) else ""
    title = f"{len(sources)} tokens in {len(every)} steps, a bar for each{more}"
    return (
        f'<svg role="img" width="{width}" height="{height:.1f}" viewBox="0 0 {width} {height:.1f}" '
        f'style="max-width:100%"><title>{title}</title>{cells}</svg>'
    )


def _legend(sources: Sequence[str], colours: dict[str, str]) -> str:
    parts = [
        f'<span style="color:{colours.get(source, _OWN)}">&#9632;</span> {html.escape(source)} {sources.count(source)}'
        for source in (*colours, *([TARGET] if TARGET in sources or not colours else []))
    ]
    return " &nbsp; ".join(parts) + "<br>" if sources else ""
