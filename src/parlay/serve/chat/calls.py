"""How families of models write calls of functions, and calls read out of an answer while it is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from parlay.text.chat_template import takes_tools


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes a call: ``begin``, a JSON object of name and ``arguments``, ``end``.

    ``begin`` is empty where the object alone is the answer. ``style`` says what differs: ``list``, a list of such
    objects after ``begin``; ``named``, the bare name, ``[ARGS]`` and an object of arguments; ``xml``, tags. Calls of
    style ``object`` are read in the variants too that small models write: see `ObjectCallReader`. In ``harmony`` the
    whole answer is messages in channels, calls or not.
    """

    mark: str
    """A text that the family's chat templates contain."""
    begin: str
    end: str
    arguments: str
    """The key under which the arguments stand."""
    style: Literal["object", "list", "named", "xml", "harmony"] = "object"


PLAIN = CallFormat("", "", "", "arguments")
HARMONY = CallFormat("<|channel|>", "<|channel|>", "", "arguments", "harmony")
FORMATS = (
    HARMONY,  # gpt-oss
    CallFormat("<function=", "<tool_call>", "</tool_call>", "arguments", "xml"),  # Qwen3-Coder
    CallFormat("<tool_call>", "<tool_call>", "</tool_call>", "arguments"),  # Hermes, Qwen
    CallFormat("[ARGS]", "[TOOL_CALLS]", "", "arguments", "named"),  # Mistral, since version 11 of its tokenizer
    CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "", "arguments", "list"),  # Mistral before
    CallFormat("<|tool_call|>", "<|tool_call|>", "", "arguments", "list"),  # Granite 3
    CallFormat('"parameters"', "", "", "parameters"),  # Llama 3
)


def format_of(template: str) -> CallFormat:
    """The format that a chat template speaks of; a template without tools gets the plain one."""
    if not takes_tools(template):
        return PLAIN
    return next((known for known in FORMATS if known.mark in template), PLAIN)


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


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
    ``single``. A call begins with one of ``marks``. The result does not depend on where pieces end, but for how it is
    cut.
    """

    def __init__(self, marks: Sequence[str], names: Collection[str], *, single: bool) -> None:
        self._marks = marks
        self._mark = ""  # the one that was found last
        self._names = names
        self._single = single
        self._buffer = ""
        self._calls = 0
        self._state: State = self._search

    @property
    def found(self) -> bool:
        """Whether any call has begun."""
        return self._calls > 0

    def feed(self, text: str) -> list[Delta]:
        """Read more text; return the parts that are certain now."""
        self._buffer += text
        return list(self._run())

    def finish(self) -> list[Delta]:
        """Return the rest when the answer is over."""
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
        found = [(place, mark) for mark in self._marks if (place := self._buffer.find(mark)) >= 0]
        kept = 0 if found else max(overlap(self._buffer, mark) for mark in self._marks)
        end, mark = min(found, default=(len(self._buffer) - kept, ""))
        text = self._buffer[:end]
        if self.found:
            text = text.rstrip()  # space before a call is dropped, so it waits for what follows
        self._take(end if found else len(text))
        if text:
            yield Text(text)
        if found:
            self._mark, self._state = mark, self._read_head

    @abstractmethod
    def _read_head(self) -> Iterator[Delta]:
        """Read from the mark up to the arguments."""

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
