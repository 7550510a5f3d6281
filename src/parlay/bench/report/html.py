"""The report as one HTML page that loads nothing: styles, tables and charts are all in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from parlay.bench.report.pieces import Missing, Section, Table
from parlay.bench.report.plots import Painter

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2125; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .4rem; padding-top: .6rem; border-top: 1px solid #d7dce0; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { max-width: 58rem; margin: .3rem 0 .8rem; }
.origin { color: #57606a; font-size: .87rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; margin: .3rem 0 1rem; }
th, td { padding: .22rem .7rem; text-align: right; border-bottom: 1px solid #e6e9ec; white-space: nowrap; }
th { color: #57606a; font-weight: 600; border-bottom: 2px solid #c5ccd3; vertical-align: bottom; }
td.words, th.words { text-align: left; }
td.long { white-space: normal; min-width: 18rem; text-align: left; }
tbody tr:hover { background: #f4f7f9; }
svg { max-width: 100%; height: auto; }
figure { margin: .8rem 0 1.2rem; }
summary { cursor: pointer; color: #57606a; font-size: .9rem; }
code { background: #f1f3f5; padding: .05rem .3rem; border-radius: 3px; }
nav { font-size: .9rem; } nav a { margin-right: 1rem; }
"""
FOLDED = 24
"""Tables of more lines than this are shown when asked for."""
LONG = 48
"""Cells of more letters than this may be broken into lines."""
_NUMBER = re.compile(r"[\d.\s%()*\-/;\N{EN DASH}]*(?:of [\d)]+)?|no tokens")
_EMPHASIS = re.compile(r"\*(\S[^*]*)\*")
_CODE = re.compile(r"`([^`]+)`")


def page(title: str, origin: Sequence[str], sections: Sequence[Section | Missing], painter: Painter | None) -> str:
    """The whole page; without a painter there are no charts."""
    shown = [section for section in sections if isinstance(section, Section)]
    missing = [section for section in sections if isinstance(section, Missing)]
    links = [f'<a href="#part{number}">{escape(each.title)}</a>' for number, each in enumerate(shown)]
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="origin">{_inline(line)}</p>' for line in origin),
        f"<nav>{''.join(links)}</nav>",
        *(_section(number, section, painter) for number, section in enumerate(shown)),
        *([_not_measured(missing)] if missing else []),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}{view}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"
    )


def _section(number: int, section: Section, painter: Painter | None) -> str:
    parts = [f'<section><h2 id="part{number}">{escape(section.title)}</h2>']
    parts += [f"<p>{_inline(section.text)}</p>"] if section.text else []
    title = ""
    for part in section.parts:
        if isinstance(part, Table) or painter is not None:
            parts += [f"<h3>{escape(part.title)}</h3>"] if part.title not in ("", title) else []
            title = part.title
        if isinstance(part, Table):
            parts.append(_table(part))
        elif painter is not None:
            parts.append(f"<figure>{painter.svg(part)}</figure>")
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    """A long one is folded."""
    words = [not all(_NUMBER.fullmatch(line[place]) for line in table.lines) for place in range(len(table.head))]
    head = "".join(f"<th{_kind(left)}>{escape(name)}</th>" for name, left in zip(table.head, words, strict=True))
    lines = [
        "<tr>" + "".join(_cell(text, left) for text, left in zip(line, words, strict=True)) + "</tr>"
        for line in table.lines
    ]
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>" + "\n".join(lines) + "</tbody>"
    made = f'<div class="scroll"><table>{inside}</table></div>'
    return f"<details><summary>{len(lines)} lines</summary>{made}</details>" if len(lines) > FOLDED else made


def _cell(text: str, left: bool) -> str:
    return f'<td class="long">{escape(text)}</td>' if len(text) > LONG else f"<td{_kind(left)}>{escape(text)}</td>"


def _kind(left: bool) -> str:
    return ' class="words"' if left else ""


def _not_measured(missing: Sequence[Missing]) -> str:
    lines = "\n".join(f"<li>{escape(each.title)}: {escape(each.why)}.</li>" for each in missing)
    return f"<section><h2>Not measured</h2>\n<ul>{lines}</ul></section>"


def _inline(text: str) -> str:
    """Text with *emphasis* and `code`, as in Markdown."""
    return _CODE.sub(r"<code>\1</code>", _EMPHASIS.sub(r"<em>\1</em>", escape(text)))
