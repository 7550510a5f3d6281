"""Reads calls of tools out of an answer while it is written: what all ways of writing calls have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A call of ``name`` begins; calls are numbered from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, as JSON text."""

    call: int
    text: str


Delta = Text | Begin | Arguments
State = Callable[[], Iterator[Delta]]
"""Takes from the buffer what it can say something of, and may put another state in its own place."""


class CallScanner(ABC):
    """Takes an answer piece by piece and tells which of it is text and which are calls of ``names``.

    What merely resembles a call, or calls something else, is text; so is everything after the first call when
    ``single``. ``mark`` is what begins a call; where it is empty, an answer is a call from its first character on, or
    none at all. The result does not depend on where pieces end, but for how it is cut.
    """

    def __init__(self, mark: str, names: Collection[str], *, single: bool) -> None:
        self._mark = mark
        self._names = names
        self._single = single
        self._buffer = ""
        self._calls = 0
        self._state: State = self._search if mark else self._read_head

    @property
    def found(self) -> bool:
        """Whether any call has begun."""
        return self._calls > 0

    def feed(self, text: str) -> list[Delta]:
        """What is certain now."""
        self._buffer += text
        return list(self._run())

    def finish(self) -> list[Delta]:
        """What is left when the answer is over."""
        rest, self._buffer = self._buffer, ""
        between = self.found and not rest.strip()
        return [] if not rest or between or self._cut_off(rest) else [Text(rest)]

    def _run(self) -> Iterator[Delta]:
        """Runs states until none can go on without more text."""
        while self._buffer:
            state, length = self._state, len(self._buffer)
            yield from self._state()
            if self._state == state and len(self._buffer) == length:
                return

    def _search(self) -> Iterator[Delta]:
        """Text, up to the next mark of a call; a part of a mark at the end is kept. Space between calls is dropped."""
        place = self._buffer.find(self._mark)
        end = place if place >= 0 else len(self._buffer) - overlap(self._buffer, self._mark)
        between = self.found and not self._buffer[:end].strip()
        if between and place < 0:
            return
        text = self._take(end)
        if text and not between:
            yield Text(text)
        if place >= 0:
            self._state = self._read_head

    @abstractmethod
    def _read_head(self) -> Iterator[Delta]:
        """What begins with the mark, up to the arguments."""

    @abstractmethod
    def _cut_off(self, rest: str) -> bool:
        """Whether the ``rest`` of an answer is of a call that was cut off, so that it is no text."""

    def _callable(self, name: str) -> bool:
        return name in self._names and not (self._single and self.found)

    def _begin(self, name: str, arguments: State) -> Begin:
        """The next call, which goes on with ``arguments``."""
        self._calls += 1
        self._state = arguments
        return Begin(self._calls - 1, name)

    def _no_call(self) -> Text:
        """The mark was text after all."""
        self._state = self._search
        return Text(self._take(len(self._mark)))

    def _arguments(self, text: str) -> Arguments:
        return Arguments(self._calls - 1, text)

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


def overlap(text: str, mark: str) -> int:
    """How much of the end of ``text`` may be the beginning of ``mark``."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
