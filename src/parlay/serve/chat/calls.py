"""How families of models write function calls, and a reader for calls in an answer while it is decoded."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from parlay.text.chat_template import takes_tools

Style = Literal["object", "list", "named", "line", "xml", "keyed", "python", "harmony"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes a call: ``begin``, a JSON object with the name and ``arguments``, ``end``.

    ``begin`` is empty if the object alone is the answer. Other styles: ``list``, a list of such objects after
    ``begin``; ``named``, the bare name, ``[ARGS]`` and an object of arguments; ``line``, the bare name in the answer's
    first line and the arguments in the next; ``xml``, tags; ``keyed``, ``call:name{key:value}`` with strings between
    two ``quote``; ``python``, Python calls. With ``object``, variants that small models write are read, too: see
    `ObjectCallReader`. With ``harmony`` the whole answer consists of messages in channels. A ``tag`` may come before
    calls that are the whole answer, and before Python calls: see `TaggedCallReader`.
    """

    mark: str
    """A text by which the family's chat templates are recognised."""
    begin: str
    end: str
    arguments: str = "arguments"
    """The key of the arguments."""
    style: Style = "object"
    quote: str = ""
    tag: str = ""

    @property
    def bare(self) -> bool:
        """Whether an answer that begins with an object is a call, as calls have no mark."""
        return not self.begin and self.style == "object"


PLAIN = CallFormat("", "", "")
HARMONY = CallFormat("<|channel|>", "<|channel|>", "", style="harmony")
FORMATS = (
    HARMONY,  # gpt-oss
    CallFormat("<seed:tool_call>", "<seed:tool_call>", "</seed:tool_call>", style="xml"),  # Seed-OSS
    CallFormat("<arg_key>", "<tool_call>", "</tool_call>", style="xml"),  # GLM-4.5 and later
    CallFormat("<function=", "<tool_call>", "</tool_call>", style="xml"),  # Qwen3-Coder, Qwen3.5
    CallFormat("<tool_call>", "<tool_call>", "</tool_call>"),  # Hermes, Qwen, SmolLM3, ERNIE 4.5, EXAONE 4, Granite 4
    CallFormat("<|tool_call>", "<|tool_call>", "<tool_call|>", style="keyed", quote='<|"|>'),  # Gemma 4
    CallFormat(
        "<start_function_call>", "<start_function_call>", "<end_function_call>", style="keyed", quote="<escape>"
    ),  # FunctionGemma
    CallFormat("<function_calls>", "<function_calls>", "</function_calls>", style="python"),  # OLMo 3
    CallFormat("<|tool_call_start|>", "<|tool_call_start|>", "<|tool_call_end|>", style="python"),  # LFM2
    CallFormat("[ARGS]", "[TOOL_CALLS]", "", style="named"),  # Mistral, since version 11 of its tokenizer
    CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "", style="list"),  # Mistral before
    CallFormat("<|/tool|>", "<|tool_call|>", "<|/tool_call|>", style="list"),  # Phi-4-mini
    CallFormat("<|tool_call|>", "<|tool_call|>", "", style="list"),  # Granite 3
    CallFormat("<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>", style="list"),  # Nemotron
    CallFormat("<|observation|>", "", "", style="line"),  # GLM-4
    CallFormat("<|python_tag|>", "", "", "parameters", tag="<|python_tag|>"),  # Llama 3.1 and later
    CallFormat('"parameters"', "", "", "parameters"),  # Llama 3
)


def format_of(template: str) -> CallFormat:
    """The format that a chat template uses; a template without tools gets `PLAIN`."""
    if not takes_tools(template):
        return PLAIN
    return next((known for known in FORMATS if known.mark in template), PLAIN)


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A call of ``name`` begins; calls are numbered from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, as JSON text."""

    call: int
    text: str


Delta = Thought | Text | Begin | Arguments
State = Callable[[], Iterator[Delta]]
"""Reads what is certain from the buffer, and may make another state the current one."""


class AnswerScanner(ABC):
    """Reads calls in an answer piece by piece. Only functions in ``names`` can be called, and only one call is read
    with ``single``; other calls are text.

    The deltas do not depend on how the text is cut into pieces.
    """

    def __init__(self, names: Collection[str], first: State, *, single: bool) -> None:
        self._names, self._single = names, single
        self._buffer, self._calls = "", 0
        self._state = first

    @property
    def found(self) -> bool:
        """Whether any call has begun."""
        return self._calls > 0

    def feed(self, text: str) -> list[Delta]:
        """Read more text; return the parts that are certain now."""
        self._buffer += text
        return list(self._run())

    @abstractmethod
    def finish(self) -> list[Delta]:
        """Return the rest at the end of the answer."""

    def _run(self) -> Iterator[Delta]:
        """Run the current state until it needs more text."""
        while self._buffer:
            state, length = self._state, len(self._buffer)
            yield from self._state()
            if self._state == state and len(self._buffer) == length:
                return

    def _callable(self, name: str) -> bool:
        return name in self._names and not (self._single and self.found)

    def _begin(self, name: str, arguments: State) -> Begin:
        """Begin the next call; ``arguments`` is the state that reads its arguments."""
        self._calls += 1
        self._state = arguments
        return Begin(self._calls - 1, name)

    def _arguments(self, text: str) -> Arguments:
        return Arguments(self._calls - 1, text)

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _up_to(self, marks: Sequence[str]) -> tuple[str, str]:
        """Take the text before the first of the marks, and that mark; a part of a mark at the end stays in the
        buffer."""
        found = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
        kept = 0 if found else max((overlap(self._buffer, mark) for mark in marks), default=0)
        end, mark = min(found, default=(len(self._buffer) - kept, ""))
        text = self._take(end)
        self._take(len(mark))
        return text, mark


class CallScanner(AnswerScanner):
    """Separates an answer's text from its calls. A call begins with one of ``marks``.

    Text that only resembles a call stays text; with ``single`` so does everything after the first call.
    """

    def __init__(self, marks: Sequence[str], names: Collection[str], *, single: bool, end: str = "") -> None:
        """``end`` is the mark after a call, which a model may omit."""
        super().__init__(names, self._search, single=single)
        self._marks, self._end = marks, end
        self._mark = ""  # the mark found last

    def finish(self) -> list[Delta]:
        rest, self._buffer = self._buffer, ""
        between = self.found and not rest.strip()
        return [] if not rest or between or self._cut_off(rest) else [Text(rest)]

    def _search(self) -> Iterator[Delta]:
        """Take text up to the next mark of a call; a part of a mark at the end is kept back. White space between calls
        is dropped."""
        text, mark = self._up_to(self._marks)
        before_call = text.rstrip() if self.found else text  # white space before a call is dropped, so it waits
        if before_call:
            yield Text(before_call)
        if mark:
            self._mark, self._state = mark, self._read_head
        self._buffer = mark + ("" if mark else text[len(before_call) :]) + self._buffer

    @abstractmethod
    def _read_head(self) -> Iterator[Delta]:
        """Read the text between the mark and the arguments."""

    def _read_end(self) -> Iterator[Delta]:
        """Read the mark after a call, if there is one."""
        rest = self._buffer.lstrip()
        if self._end.startswith(rest) and rest != self._end:
            return
        self._buffer = rest.removeprefix(self._end) if rest.startswith(self._end) else self._buffer
        self._state = self._search
        yield from ()

    def _cut_off(self, rest: str) -> bool:
        """Whether ``rest``, the end of the answer, is a call that was cut off, which is not text."""
        return self._state == self._read_head and len(rest) > len(self._mark)

    def _no_call(self) -> Text:
        """Treat the mark as text, as no call follows."""
        self._state = self._search
        return Text(self._take(len(self._mark)))


class FieldCallReader(CallScanner):
    """Reads calls whose arguments are written one by one. Each argument is sent as soon as it is complete; one that is
    cut off is dropped."""

    _told = 0

    def _head_read(self, name: str) -> Begin:
        """Begin a call of this function, whose arguments follow."""
        self._told = 0
        return self._begin(name, self._read_fields)

    @abstractmethod
    def _read_fields(self) -> Iterator[Delta]:
        """Read the next argument, or the end of the arguments."""

    def _tell(self, name: str, value: str) -> Arguments:
        """Send an argument; ``value`` is JSON."""
        self._told += 1
        return self._arguments(f"{', ' if self._told > 1 else '{'}{json.dumps(name, ensure_ascii=False)}: {value}")

    def _told_all(self, after: State) -> Arguments:
        """End the arguments; ``after`` is the next state."""
        self._state = after
        return self._arguments("}" if self._told else "{}")


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of ``text`` may begin ``mark``."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
