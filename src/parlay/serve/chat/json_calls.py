"""Reads calls written as JSON objects: bare, fenced, in tags, in a list, or after a bare name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

from parlay.serve.chat.calls import CallFormat, CallScanner, Delta, Text

FENCE = "```"
TAGS = ("tool_call", "function_call", "tool", "tools", "response", "json", "xml", "JSON")
"""Tags that models of the Hermes family put around a call instead of the one that their template names."""

_PHI = "functools"
_SPACE = r"\s*"
_NAME = r"(?P<name>[\w-]{0,64})"


def call_reader(
    written: CallFormat, names: Collection[str], *, single: bool = False, certain: bool = False
) -> CallScanner:
    """Make a reader for calls of the functions ``names`` in one answer.

    A call that is cut off before its arguments is dropped if it can't be text: after the format's own mark, or if
    ``certain`` says that an answer which begins like a call is one.
    """
    if written.style == "list":
        return ListedCallReader(written, names, single=single)
    if written.style == "named":
        return NamedCallReader(written, names, single=single)
    if written.style == "line":
        return LineCallReader(names, single=single)
    return ObjectCallReader(written, names, single=single, certain=certain)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A pattern for a run of text: the ``whole`` run, or any ``beginning`` of it, which means that more text is
    needed."""

    whole: re.Pattern[str]
    beginning: re.Pattern[str]


@cache
def _shape(*parts: str) -> _Shape:
    """Make the pattern from ``parts``, regular expressions; a beginning may end after each part."""
    beginning = ""
    for part in reversed(parts):
        beginning = f"(?:{part}{beginning})?"
    return _Shape(re.compile("".join(parts)), re.compile(beginning))


def _letters(text: str) -> list[str]:
    return [re.escape(letter) for letter in text]


NAMED_OBJECT = (r"\{", _SPACE, *_letters('"name"'), _SPACE, ":", _SPACE, '"', _NAME, '"', _SPACE, ",", _SPACE)
"""A call's object up to the key of its arguments."""


def _arguments_key(key: str) -> list[str]:
    return [*_letters(f'"{key}"'), _SPACE, ":", _SPACE, r"\{"]


class JsonCallReader(CallScanner):
    """Reads a call's arguments: a JSON object up to its closing brace."""

    def __init__(self, marks: tuple[str, ...], names: Collection[str], *, single: bool, end: str = "") -> None:
        super().__init__(marks, names, single=single, end=end)
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def _read_arguments(self) -> Iterator[Delta]:
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
        """Read what closes the call; nothing does if the arguments are the whole call."""
        self._state = self._search
        yield from ()

    def _free(self) -> Iterator[Delta]:
        """Take everything as text: no further call can come."""
        yield Text(self._take(len(self._buffer)))

    def _drop_space(self) -> None:
        self._buffer = self._buffer.lstrip()


class ObjectCallReader(JsonCallReader):
    """Reads calls that are one JSON object each, between the format's marks.

    Small models write the object in other ways, too. All of these are calls if the object names a function: bare at the
    beginning of the answer, in a fenced block, in another of `TAGS`, or in a tag in a fenced block; the arguments may
    be under "arguments" or "parameters"; the outer braces may be doubled, as Qwen2.5's template shows them by mistake.
    Fields after the arguments are dropped.
    """

    def __init__(self, written: CallFormat, names: Collection[str], *, single: bool, certain: bool) -> None:
        self._ends = {f"<{tag}>": f"</{tag}>" for tag in TAGS}
        if written.begin:
            self._ends[written.begin] = written.end
        super().__init__((FENCE, *self._ends), names, single=single)
        opening = [NAMED_OBJECT[0], r"(?P<second>\{?)", *NAMED_OBJECT[1:]]
        call = [*opening, '"', "(?P<key>[a-z]{0,10})", '"', _SPACE, ":", _SPACE, r"\{"]
        fence, tag = [*_letters(FENCE), r"\w{0,16}", _SPACE], [r"(?P<tag><\w{0,16}>?)", _SPACE]
        self._bare = (_shape(_SPACE, *call),)
        self._marked = (_shape(*fence, *call), _shape(*tag, *call), _shape(*fence, *tag, *call))
        self._keys = {written.arguments, "arguments", "parameters"}
        self._own_mark, self._certain = written.begin, certain
        self._closers: list[str] = []
        self._open = False  # whether the call's own brace has not come yet
        self._state = self._read_first

    def _read_first(self) -> Iterator[Delta]:
        """Read a call without a mark at the beginning of the answer."""
        yield from self._read_call(self._bare)

    def _read_head(self) -> Iterator[Delta]:
        yield from self._read_call(self._marked)

    def _read_call(self, heads: tuple[_Shape, ...]) -> Iterator[Delta]:
        match = next((found for head in heads if (found := head.whole.match(self._buffer))), None)
        if match is not None and self._is_call(match):
            tag = match.groupdict().get("tag")
            braces = ["}"] * (2 if match["second"] else 1)
            self._closers = [*braces, *([self._ends[tag]] if tag else []), *([FENCE] if self._mark == FENCE else [])]
            self._open = True
            self._take(match.end() - 1)
            yield self._begin(match["name"], self._read_arguments)
        elif match is not None or not any(head.beginning.fullmatch(self._buffer) for head in heads):
            self._state = self._search
            if self._mark:
                yield self._no_call()

    def _is_call(self, head: re.Match[str]) -> bool:
        tag = head.groupdict().get("tag")
        return self._callable(head["name"]) and head["key"] in self._keys and (tag is None or tag in self._ends)

    def _read_tail(self) -> Iterator[Delta]:
        """Read what closes the call, in this order: its braces, its tag, its fence. A model may omit all but the first
        brace."""
        while self._closers:
            closer, rest = self._closers[0], self._buffer.lstrip()
            if closer.startswith(rest) and rest != closer:
                return  # it may still come
            if rest.startswith(closer):
                self._buffer = rest.removeprefix(closer)
            elif self._open:
                break
            self._open, self._closers = False, self._closers[1:]
        if self._closers and rest.startswith(","):
            self._depth, self._state = 1, self._skip_fields
            return
        self._state = self._search if self._mark or self._own_mark else self._after
        yield from ()

    def _skip_fields(self) -> Iterator[Delta]:
        """Drop the object's fields after the arguments, up to its closing brace."""
        inside = next((place for place, letter in enumerate(self._buffer) if self._closes(letter)), len(self._buffer))
        if inside < len(self._buffer):
            self._state = self._read_tail
        self._take(inside)
        yield from ()

    def _after(self) -> Iterator[Delta]:
        """Read the text after a call at the beginning of the answer."""
        self._drop_space()
        if self._buffer:
            self._state = self._free
        yield from ()

    def _cut_off(self, rest: str) -> bool:
        if self._state == self._read_head:
            return self._mark == self._own_mark and len(rest) > len(self._mark)
        within = self._state in (self._read_tail, self._skip_fields)
        return within or (self._state == self._read_first and self._certain)


class ListedCallReader(JsonCallReader):
    """Reads call objects after the format's mark, in a list or separated by semicolons. Phi-4 writes ``functools`` as
    the mark, too."""

    def __init__(self, written: CallFormat, names: Collection[str], *, single: bool) -> None:
        marks = (written.begin, _PHI) if written.end else (written.begin,)
        super().__init__(marks, names, single=single, end=written.end)
        call = [*NAMED_OBJECT, *_arguments_key(written.arguments)]
        self._first = {mark: _shape(*_letters(mark), _SPACE, r"\[?", _SPACE, *call) for mark in marks}
        self._next = _shape("[,;]", _SPACE, *call)
        self._follows = False  # whether the current head belongs to a further call in the list

    def _read_head(self) -> Iterator[Delta]:
        head = self._next if self._follows else self._first[self._mark]
        match = head.whole.match(self._buffer)
        if match is not None and self._callable(match["name"]):
            self._take(match.end() - 1)
            yield self._begin(match["name"], self._read_arguments)
        elif match is not None or head.beginning.fullmatch(self._buffer) is None:
            if not self._follows:
                yield self._no_call()
            self._follows, self._state = False, self._search

    def _read_tail(self) -> Iterator[Delta]:
        """Read the call's closing brace, then a comma or the end of the list."""
        self._drop_space()
        if self._buffer.startswith("}"):
            self._take(1)
            self._drop_space()
            if not self._buffer:
                self._state = self._between
                return
        self._state = self._between if self._buffer else self._read_tail
        yield from ()

    def _between(self) -> Iterator[Delta]:
        """Read the next call of the list, or its end; anything else is text."""
        self._drop_space()
        if self._buffer.startswith((",", ";")):
            self._follows, self._state = True, self._read_head
        elif self._buffer:
            self._take(self._buffer.startswith("]"))
            self._follows, self._state = False, self._read_end if self._end else self._search
        yield from ()

    def _cut_off(self, rest: str) -> bool:
        begun = "{" in rest if self._mark == _PHI else len(rest) > len(self._mark)  # a word that text has, too
        return (self._state == self._read_head and begun) or self._state in (self._read_tail, self._read_end)


class NamedCallReader(JsonCallReader):
    """Reads calls that are a bare name, optionally an id, and an object of arguments."""

    def __init__(self, written: CallFormat, names: Collection[str], *, single: bool) -> None:
        super().__init__((written.begin,), names, single=single)
        start, end = [*_letters(written.begin), _SPACE, _NAME], [*_letters("[ARGS]"), _SPACE, r"\{"]
        self._heads = (_shape(*start, *end), _shape(*start, *_letters("[CALL_ID]"), r"\w*", *end))

    def _read_head(self) -> Iterator[Delta]:
        match = next((found for head in self._heads if (found := head.whole.match(self._buffer))), None)
        if match is not None and self._callable(match["name"]):
            self._take(match.end() - 1)
            yield self._begin(match["name"], self._read_arguments)
        elif match is not None or not any(head.beginning.fullmatch(self._buffer) for head in self._heads):
            yield self._no_call()


class LineCallReader(JsonCallReader):
    """Reads a call that is the whole answer: the bare name in the first line, the arguments in the next."""

    def __init__(self, names: Collection[str], *, single: bool) -> None:
        super().__init__((), names, single=single)
        self._state = self._read_head

    def _read_head(self) -> Iterator[Delta]:
        name, line, rest = self._buffer.lstrip().partition("\n")
        arguments = rest.lstrip()
        if line and arguments.startswith("{") and self._callable(name.strip()):
            self._buffer = arguments
            yield self._begin(name.strip(), self._read_arguments)
        elif arguments or not any(each.startswith(name.strip()) for each in self._names):
            self._state = self._search

    def _cut_off(self, rest: str) -> bool:
        return self._state == self._read_head and "\n" in rest.lstrip()
