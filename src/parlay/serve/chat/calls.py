"""Reads calls that models write as JSON objects: alone, in a list, or after a bare name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

from parlay.serve.chat.formats import CallFormat
from parlay.serve.chat.scanning import CallScanner, Delta, Text


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


class CallReader(CallScanner):
    """Reads what a `CallFormat` says.

    A call that is cut off before its arguments is left out where it can be nothing else: after a mark, or where an
    answer that begins like a call is ``certain`` to be one.
    """

    def __init__(
        self, shape: CallFormat, names: Collection[str], *, single: bool = False, certain: bool = False
    ) -> None:
        super().__init__(shape.begin, names, single=single)
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
        self._certain = certain or bool(shape.begin)
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def _cut_off(self, rest: str) -> bool:
        in_head = self._state == self._read_head and len(rest) > len(self._mark)
        return self._state == self._read_tail or (self._certain and in_head)

    # ------------------------------------------------------------------------------------------------------- states

    def _free(self) -> Iterator[Delta]:
        """No call can come any more."""
        yield Text(self._take(len(self._buffer)))

    def _read_head(self) -> Iterator[Delta]:
        match = self._head.whole.match(self._buffer)
        if match is not None and self._callable(match["name"]):
            self._take(match.end() - 1)
            yield self._begin(match["name"], self._read_arguments)
        elif match is not None or self._head.beginning.fullmatch(self._buffer) is None:
            yield from self._read_no_call()

    def _read_no_call(self) -> Iterator[Delta]:
        if self._head is self._next:
            self._head, self._state = self._first, self._search
        elif self._mark:
            yield self._no_call()
        else:
            self._state = self._free

    def _read_arguments(self) -> Iterator[Delta]:
        """Up to the brace that closes them."""
        for place, letter in enumerate(self._buffer):
            if self._closes(letter):
                yield self._arguments(self._take(place + 1))
                self._state = self._read_tail
                return
        yield self._arguments(self._take(len(self._buffer)))

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
        self._state = self._between if self._listed else self._search if self._mark else self._after
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
