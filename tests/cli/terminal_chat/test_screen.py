"""The speed behind the text is erased before more text comes, and never breaks the line."""

from __future__ import annotations

import io
from itertools import count

import pytest

from parlay.cli.terminal_chat.screen import Screen
from parlay.llm.outputs import Piece
from parlay.system.terminal import Tint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_on(out: io.StringIO, width: int = 40) -> Screen:
    ticks = count()
    return Screen(out, Tint(out), width, clock=lambda: float(next(ticks)))


def test_a_pipe_gets_the_text_alone() -> None:
    out = io.StringIO()
    screen = screen_on(out)
    for text in ("One ", "two", "\n"):
        screen.write([Piece(text, "target")], 1)
    screen.end()
    assert out.getvalue() == "One two\n"


def test_a_terminal_shows_the_speed_and_erases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    screen = screen_on(out)
    for text in ("One ", "two"):
        screen.write([Piece(text, "target")], 3)
    screen.end()
    speed = "  3.0 tokens/s"
    assert out.getvalue() == f"One two\x1b[2m{speed}\x1b[22m\x1b[{len(speed)}D\x1b[K\n"


def test_no_speed_where_it_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    screen = screen_on(out, width=12)
    for text in ("One ", "two"):
        screen.write([Piece(text, "target")], 3)
    assert "tokens/s" not in out.getvalue()
