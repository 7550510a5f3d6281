"""The speed behind the text is erased before more text comes, and never breaks the line."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import count

import pytest

from parlay.cli.terminal_chat.screen import Screen
from parlay.llm.outputs import Piece
from parlay.system.terminal import Tint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_on(out: io.StringIO, width: Callable[[], int] = lambda: 40) -> Screen:
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
    screen = screen_on(out, lambda: 12)
    for text in ("One ", "two"):
        screen.write([Piece(text, "target")], 3)
    assert "tokens/s" not in out.getvalue()


def test_a_window_may_become_narrower_amid_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    widths = iter([80, 18])
    out = Terminal()
    screen = screen_on(out, lambda: next(widths))
    for text in ("Twelve tokens ", "and ", "more"):
        screen.write([Piece(text, "target")], 3)
    assert out.getvalue().count("tokens/s") == 1


def test_a_line_ends_where_it_is_as_long_as_the_window_is_wide() -> None:
    out = Terminal()
    screen = screen_on(out, lambda: 1)
    screen.write([Piece("One", "target")], 1)
    screen.end()
    assert out.getvalue() == "One\n"


def test_a_terminal_obeys_no_text_and_a_pipe_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    harmless = "\tn\xe9e \u3000 \U0001f469\u200d\U0001f680 \u05d0\u200f"
    text = f"\x1b]0;owned\x07 \x9b31m \u202eright\r\n{harmless}"
    for out, said in [
        (io.StringIO(), text),
        (Terminal(), f"\ufffd]0;owned\ufffd \ufffd31m \ufffdright\n{harmless}"),
    ]:
        screen = screen_on(out)
        screen.write([Piece(text, "target")], 1)
        screen.end()
        assert out.getvalue() == f"{said}\n"
