"""Writes to the terminal, with text coloured by its source where colour is wanted; and handles Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Self, TextIO

from parlay.types import TARGET

_TINTS = (36, 35, 33, 32, 34)  # cyan, magenta, yellow, green, blue
_REPEATED = 80
"""The most characters of a user's text that an error message repeats."""


class Tint:
    """Gives each drafter a colour, in order of appearance; the target's own tokens stay plain.

    On a terminal, control characters are replaced; a file or a pipe gets every character.
    """

    def __init__(self, stream: TextIO) -> None:
        self.enabled = wants_colour(stream)
        self._stream = stream
        self._colours: dict[str, int] = {}

    def __call__(self, text: str, source: str) -> str:
        text = shown(text, self._stream)
        if not self.enabled or source == TARGET:
            return text
        colour = self._colours.setdefault(source, _TINTS[len(self._colours) % len(_TINTS)])
        return f"\x1b[{colour}m{text}\x1b[39m"


def wants_colour(stream: TextIO) -> bool:
    """Whether the stream is a terminal that shows colours; NO_COLOR (no-color.org) forbids them."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


class Excerpt:
    """Writes streamed text, indented and folded, up to a number of lines."""

    def __init__(self, out: TextIO, tint: Tint, lines: int, width: int) -> None:
        self._out = out
        self._tint = tint
        self._lines = lines
        self._width = width
        self._line = self._column = 0

    def write(self, text: str, source: str) -> None:
        for number, part in enumerate(text.split("\n")):
            if number:
                self._break()
            while part and self._line < self._lines:
                room = self._width - 2 - self._column
                if room == 0:
                    self._break()
                    continue
                self._put(part[:room], source)
                part = part[room:]
        self._out.flush()

    def end(self) -> None:
        if self._column:
            self._out.write("\n")

    def _put(self, text: str, source: str) -> None:
        self._out.write(("" if self._column else "  ") + self._tint(text, source))
        self._column += len(text)

    def _break(self) -> None:
        if self._line < self._lines:
            self._out.write("\n")
        self._line += 1
        self._column = 0


def aligned(rows: Sequence[Sequence[str]], names: int = 1) -> list[str]:
    """Return a line for each row: the first ``names`` columns aligned left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < names else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class Interrupt:
    """Context manager: the first Ctrl-C is only noted, so that the current step can finish; a second one raises
    KeyboardInterrupt.

    ``signals``: the signals to note; by default SIGINT, the signal of Ctrl-C.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.noted: int | None = None
        """The signal that was noted."""
        self._signals = signals or (signal.SIGINT,)

    def __enter__(self) -> Self:
        gets_signals = threading.current_thread() is threading.main_thread()  # no other thread gets them
        ours = [each for each in self._signals if gets_signals and signal.getsignal(each) != signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._note) for each in ours}
        return self

    def __exit__(self, *error: object) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.noted is None:
            self.noted = signum
        elif signum != signal.SIGHUP:  # a terminal that closes sends SIGHUP several times
            raise KeyboardInterrupt


@contextmanager
def undivided() -> Iterator[None]:
    """Delay a first Ctrl-C, SIGTERM or SIGHUP until after the block, so that the block makes all of its changes."""
    with Interrupt(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as interrupt:
        yield
    if interrupt.noted is not None:
        signal.raise_signal(interrupt.noted)


def speed(tokens_per_second: float) -> str:
    """Format tokens per second, with one decimal below ten."""
    return f"{tokens_per_second:.{1 if tokens_per_second < 9.95 else 0}f} tokens/s"


def counted(count: int, word: str) -> str:
    """Format a count with its noun, which is singular for one: 1 token, 2 tokens."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def short(text: object) -> str:
    """Return the beginning of a user's text, for an error message that repeats it. Short texts stay whole."""
    words = str(text)
    return words if len(words) <= _REPEATED else f"{words[:_REPEATED]}..."


def shown(text: str, stream: TextIO) -> str:
    """Make untrusted text safe to write to a stream; the text changes only if the stream is a terminal."""
    return printable(text.replace("\r", "")) if stream.isatty() else text


def printable(text: str) -> str:
    """Replace the characters of untrusted text that control a terminal: control characters and direction marks.

    Marks within a letter stay, such as those that join an emoji's parts.
    """
    if text.isprintable():
        return text
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_control(each) else each for each in text)


_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def _is_control(character: str) -> bool:
    return character in _DIRECTIONS or (unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t")
