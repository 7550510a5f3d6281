"""Reads calls of tools out of an answer while it is written."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

from parlay.serve.chat.formats import CallFormat


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


@dataclass(frozen=True, slots=True)
class _Shape:
    """A run of text to recognise: all of it, or (to know whether waiting is worth it) any beginning of it."""

    whole: re.Pattern[str]
    beginning: re.Pattern[str]


@cache
def _shape(*parts: str) -> _Shape:
    """``parts`` are regular expressions; a beginning may end after each."""
    beginning = ""
    for part in reversed(parts):
        beginning = f"(?:{part}{beginning})?"
    return _Shape(re.compile("".join(parts)), re.compile(beginning))


def _named_call(begin: str, space: str, name: str) -> _Shape:
    """A bare name, which an id may follow, and where the arguments begin."""
    start, end = [*_letters(begin), space, name], [*_letters("[ARGS]"), space, r"\{"]
    id = [*_letters("[CALL_ID]"), r"\w*"]
    beginnings = [_shape(*start, *end), _shape(*start, *id, *end)]
    either = "|".join(one.beginning.pattern.replace("?P<name>", "?:") for one in beginnings)
    return _Shape(re.compile("".join([*start, f"(?:{''.join(id)})?", *end])), re.compile(either))


def _letters(text: str) -> list[str]:
    return [re.escape(letter) for letter in text]


class CallReader:
    """Takes an answer piece by piece and tells which of it is text and which are calls of ``names``.

    What merely resembles a call, or calls something else, is text; so is everything after the first call when
    ``single``. A call that is cut off before its arguments is left out where it can be nothing else: after a mark, or
    where an answer that begins like a call is ``certain`` to be one. The result does not depend on where pieces end,
    but for how it is cut.
    """

    def __init__(
        self, shape: CallFormat, names: Collection[str], *, single: bool = False, certain: bool = False
    ) -> None:
        space, name = r"\s*", r"(?P<name>[\w-]{0,64})"
        key = [space, ",", space, *_letters(f'"{shape.arguments}"'), space, ":", space, r"\{"]
        named = [r"\{", space, *_letters('"name"'), space, ":", space, '"', name, '"']
        self._listed = shape.style == "list"
        opening = [r"\[", space] if self._listed else []
        self._first = _shape(*_letters(shape.begin), space, *opening, *named, *key)
        self._next = _shape(",", space, *named, *key)
        self._tail = _shape(space, r"\}", *([] if self._listed else [space, *_letters(shape.end)]))
        if shape.style == "named":  # an id may stand between
            self._first = _named_call(shape.begin, space, name)
            self._tail = _shape("")
        self._head = self._first
        self._begin = shape.begin
        self._names = names
        self._single = single
        self._certain = certain or bool(shape.begin)
        self._buffer = ""
        self._calls = 0
        self._state = self._search if shape.begin else self._read_head
        self._depth = 0
        self._in_string = False
        self._escaped = False

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
        if self._state == self._read_tail or (self.found and not rest.strip()):
            return []
        if self._certain and self._state == self._read_head and len(rest) > len(self._begin):
            return []
        return [Text(rest)] if rest else []

    def _run(self) -> Iterator[Delta]:
        """Until nothing more can be said without more text."""
        while self._buffer:
            state, length = self._state, len(self._buffer)
            yield from self._state()
            if self._state == state and len(self._buffer) == length:
                return

    # ------------------------------------------------------------------------------------------------------- states

    def _free(self) -> Iterator[Delta]:
        """No call can come any more."""
        yield Text(self._take(len(self._buffer)))

    def _search(self) -> Iterator[Delta]:
        """Text, up to the next mark of a call; a part of a mark at the end is kept. Space between calls is dropped."""
        place = self._buffer.find(self._begin)
        end = place if place >= 0 else len(self._buffer) - overlap(self._buffer, self._begin)
        between = self.found and not self._buffer[:end].strip()
        if between and place < 0:
            return
        text = self._take(end)
        if text and not between:
            yield Text(text)
        if place >= 0:
            self._state = self._read_head

    def _read_head(self) -> Iterator[Delta]:
        match = self._head.whole.match(self._buffer)
        if match is not None and match["name"] in self._names and not (self._single and self.found):
            self._take(match.end() - 1)
            self._calls += 1
            self._state = self._read_arguments
            yield Begin(self._calls - 1, match["name"])
        elif match is not None or self._head.beginning.fullmatch(self._buffer) is None:
            yield from self._no_call()

    def _no_call(self) -> Iterator[Delta]:
        if self._head is self._next:
            self._head, self._state = self._first, self._search
        elif self._begin:
            yield Text(self._take(len(self._begin)))
            self._state = self._search
        else:
            self._state = self._free

    def _read_arguments(self) -> Iterator[Delta]:
        """Up to the brace that closes them."""
        for place, letter in enumerate(self._buffer):
            if self._closes(letter):
                yield Arguments(self._calls - 1, self._take(place + 1))
                self._state = self._read_tail
                return
        yield Arguments(self._calls - 1, self._take(len(self._buffer)))

    def _closes(self, letter: str) -> bool:
        if self._in_string:
            self._in_string = letter != '"' or self._escaped
            self._escaped = letter == "\\" and not self._escaped
            return False
        self._in_string = letter == '"'
        self._depth += (letter in "{[") - (letter in "}]")
        return self._depth == 0 and letter in "}]"

    def _read_tail(self) -> Iterator[Delta]:
        match = self._tail.whole.match(self._buffer)
        if match is not None:
            self._take(match.end())
        elif self._tail.beginning.fullmatch(self._buffer) is not None:
            return
        self._state = self._between if self._listed else self._search if self._begin else self._after
        yield from ()

    def _between(self) -> Iterator[Delta]:
        """In a list of calls: the next one, or the list's end. Anything else is text again."""
        self._take(len(self._buffer) - len(self._buffer.lstrip()))
        if self._buffer.startswith(","):
            self._head, self._state = self._next, self._read_head
        elif self._buffer:
            self._take(self._buffer.startswith("]"))
            self._head, self._state = self._first, self._search
        yield from ()

    def _after(self) -> Iterator[Delta]:
        """Calls without a mark stand alone; what a model writes after one is text."""
        self._take(len(self._buffer) - len(self._buffer.lstrip()))
        if self._buffer:
            self._state = self._free
        yield from ()

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


def overlap(text: str, mark: str) -> int:
    """How much of the end of ``text`` may be the beginning of ``mark``."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
