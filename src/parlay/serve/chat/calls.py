"""How families of models write calls of functions, and calls read out of an answer while it is written."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from parlay.text.chat_template import takes_tools


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes a call: ``begin``, a JSON object of name and ``arguments``, ``end``.

    Where ``begin`` is empty, an answer is a call from its first character on, or none at all. ``style`` says what
    differs: ``list``, a list of such objects after ``begin``; ``named``, the bare name, ``[ARGS]`` and an object of
    arguments; ``xml``, tags.
    """

    mark: str
    """What the chat templates of the family hold."""
    begin: str
    end: str
    arguments: str
    """The key under which the arguments stand."""
    style: Literal["object", "list", "named", "xml"] = "object"


PLAIN = CallFormat("", "", "", "arguments")
FORMATS = (
    CallFormat("<function=", "<tool_call>", "</tool_call>", "arguments", "xml"),  # Qwen3-Coder
    CallFormat("<tool_call>", "<tool_call>", "</tool_call>", "arguments"),  # Hermes, Qwen
    CallFormat("[ARGS]", "[TOOL_CALLS]", "", "arguments", "named"),  # Mistral, since version 11 of its tokenizer
    CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "", "arguments", "list"),  # Mistral before
    CallFormat('"parameters"', "", "", "parameters"),  # Llama 3
)


def format_of(template: str) -> CallFormat:
    """The format that a chat template speaks of; a template without tools gets the plain one."""
    if not takes_tools(template):
        return PLAIN
    return next((known for known in FORMATS if known.mark in template), PLAIN)


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
