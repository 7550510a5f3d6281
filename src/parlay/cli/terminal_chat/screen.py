"""Shows text as it is decoded: tinted by its source, followed on a terminal by the current speed."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import TextIO

from parlay.llm.outputs import Piece
from parlay.system.terminal import Tint, speed, wants_colour

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
_EVERY = 0.1
"""Seconds between two updates of the speed."""


class Screen:
    """Writes one answer; ``width()`` returns the terminal's columns, which may change.

    The dimmed speed follows the text, and is erased before more text comes. It is omitted if it would not fit into the
    line.
    """

    def __init__(
        self, out: TextIO, tint: Tint, width: Callable[[], int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._out, self._tint, self._width, self._clock = out, tint, width, clock
        self._live = wants_colour(out)
        self._column = self._shown = self._tokens = 0
        self._began: float | None = None
        self._updated = 0.0

    def write(self, pieces: Sequence[Piece], tokens: int) -> None:
        """Show the text and the number of tokens that a step has committed."""
        now = self._clock()
        if self._began is None:
            self._began = now  # the first step's time includes the prompt
        else:
            self._tokens += tokens
        text = "".join(piece.text for piece in pieces)
        if text:
            self._erase()
            self._out.write("".join(self._tint(piece.text, piece.writer or piece.source) for piece in pieces))
            self._advance(text)
        if self._live and self._tokens and now - self._updated > _EVERY:
            self._updated = now
            self._show(f"  {speed(self._tokens / (now - self._began))}")
        self._out.flush()

    def end(self) -> None:
        """End the line."""
        self._erase()
        if self._column:
            self._out.write("\n")
        self._out.flush()

    def _show(self, speed: str) -> None:
        self._erase()
        width = self._width()
        if self._column % width + len(speed) < width:
            self._out.write(f"{_DIM}{speed}{_PLAIN}")
            self._shown = len(speed)

    def _erase(self) -> None:
        if self._shown:
            self._out.write(f"\x1b[{self._shown}D\x1b[K")
            self._shown = 0

    def _advance(self, text: str) -> None:
        """Track the cursor's column; a terminal wraps lines at its width."""
        _, newline, last = text.rpartition("\n")
        self._column = (0 if newline else self._column) + sum(map(_columns, last))


def _columns(character: str) -> int:
    """How many terminal columns a character takes."""
    if character == "\t":
        return 8
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
