"""Splits an answer into what protocols report: reasoning, text, and calls with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parlay.serve.chat.calls import Arguments, Begin, CallFormat, CallScanner, Text, Thought, overlap
from parlay.serve.chat.harmony import HarmonyReader
from parlay.serve.chat.json_calls import call_reader
from parlay.serve.chat.xml_calls import XmlCallReader
from parlay.text.reasoning import BEGIN, END, Thoughts


def thought_length(text: str, thoughts: Thoughts) -> int:
    """How many characters of a whole answer are reasoning, marks included."""
    if thoughts == "none" or (thoughts == "maybe" and not text.lstrip().startswith(BEGIN)):
        return 0
    end = text.find(END)
    return len(text) if end < 0 else end + len(END)


class ThoughtReader:
    """Splits an answer into its reasoning and the rest; ``begun``: the prompt holds the mark that begins it.

    An answer that begins with something else has no reasoning. White space around either part is dropped. The result
    does not depend on where pieces end, but for how it is cut.
    """

    def __init__(self, *, begun: bool) -> None:
        self._buffer = ""
        self._state = self._think if begun else self._begin
        self._written = False  # whether the present part has begun

    @property
    def over(self) -> bool:
        """Whether all that follows is answer."""
        return self._state == self._answer

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and answer that are certain now."""
        self._buffer += text
        if self._state == self._begin:
            self._begin()
        thought = self._think() if self._state == self._think else ""
        return thought, self._answer() if self._state == self._answer else ""

    def finish(self) -> tuple[str, str]:
        """Return the rest when the answer is over."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._think:
            return rest.rstrip(), ""
        return "", rest

    def _begin(self) -> str:
        """Until it is clear whether the mark comes."""
        start = self._buffer.lstrip()
        if start.startswith(BEGIN):
            self._buffer = start.removeprefix(BEGIN)
            self._state = self._think
        elif not BEGIN.startswith(start):
            self._state = self._answer
            self._written = True  # it has no reasoning before it, so its white space is its own
        return ""

    def _think(self) -> str:
        """Up to the mark; white space and a part of the mark at the end are kept back."""
        self._skip_space()
        thought, mark, rest = self._buffer.partition(END)
        if mark:
            self._buffer, self._state, self._written = rest, self._answer, False
            return thought.rstrip()
        end = len(thought[: len(thought) - overlap(thought, END)].rstrip())
        self._buffer = thought[end:]
        return thought[:end]

    def _answer(self) -> str:
        self._skip_space()
        answer, self._buffer = self._buffer, ""
        return answer

    def _skip_space(self) -> None:
        """At the beginning of a part."""
        if not self._written:
            self._buffer = self._buffer.lstrip()
            self._written = bool(self._buffer)


__all__ = ["AnswerReader", "AnswerShape", "Arguments", "Begin", "Delta", "Text", "Thought"]

Delta = Thought | Text | Begin | Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """The parts that answers to one request may have. ``calls`` None: there are none to be read; for the rest see
    `call_reader`.
    """

    calls: CallFormat | None = None
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schemas of arguments by the names of those that may be called."""
    single: bool = False
    certain: bool = False
    thoughts: Thoughts = "none"

    def reader(self) -> AnswerReader:
        """One for each sample."""
        return AnswerReader(self)

    def read(self, text: str) -> list[Delta]:
        """A whole answer."""
        reader = self.reader()
        return [*reader.feed(text), *reader.finish()]


class AnswerReader:
    """Takes one sample's text piece by piece."""

    def __init__(self, shape: AnswerShape) -> None:
        self._calls = None if shape.calls is None else _scanner(shape.calls, shape)
        self._thoughts = None if shape.thoughts == "none" else ThoughtReader(begun=shape.thoughts == "begun")

    @property
    def called(self) -> bool:
        """Whether any call has begun."""
        return self._calls is not None and self._calls.found

    def feed(self, text: str) -> list[Delta]:
        """The parts that are certain by now."""
        return self._read(text) if self._thoughts is None else self._both(*self._thoughts.feed(text))

    def finish(self) -> list[Delta]:
        """Return the rest when the answer is over."""
        left = [] if self._thoughts is None else self._both(*self._thoughts.finish())
        return left if self._calls is None else [*left, *self._calls.finish()]

    def _both(self, thought: str, answer: str) -> list[Delta]:
        return [*([Thought(thought)] if thought else []), *self._read(answer)]

    def _read(self, answer: str) -> list[Delta]:
        if self._calls is None:
            return [Text(answer)] if answer else []
        return list(self._calls.feed(answer))


def _scanner(written: CallFormat, shape: AnswerShape) -> CallScanner | HarmonyReader:
    if written.style == "harmony":
        return HarmonyReader(shape.functions, single=shape.single)
    if written.style == "xml":
        return XmlCallReader(shape.functions, single=shape.single)
    return call_reader(written, shape.functions, single=shape.single, certain=shape.certain)
