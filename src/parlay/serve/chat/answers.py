"""Splits an answer into what protocols report: reasoning, text, and calls with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parlay.serve.chat.calls import AnswerScanner, Arguments, Begin, CallFormat, Delta, Text, Thought, overlap
from parlay.serve.chat.harmony import HarmonyReader
from parlay.serve.chat.json_calls import call_reader
from parlay.serve.chat.literal_calls import KeyedCallReader, PythonCallReader, TaggedCallReader
from parlay.serve.chat.xml_calls import XmlCallReader
from parlay.text.reasoning import THINK, Tags, Thoughts

__all__ = ["AnswerReader", "AnswerShape", "Arguments", "Begin", "Delta", "Text", "Thought"]


def thought_length(text: str, thoughts: Thoughts, tags: Tags = THINK) -> int:
    """How many characters of a whole answer are reasoning, including its marks."""
    if thoughts == "none" or (thoughts == "maybe" and not text.lstrip().startswith(tags.begin)):
        return 0
    end = text.find(tags.end)
    return len(text) if end < 0 else end + len(tags.end)


class ThoughtReader:
    """Splits an answer into its reasoning and the rest; ``begun``: the prompt already ends in the mark that begins
    reasoning.

    An answer that does not begin with that mark has no reasoning. White space around both parts is dropped. The parts
    do not depend on how the text is cut into pieces.
    """

    def __init__(self, tags: Tags = THINK, *, begun: bool) -> None:
        self._tags, self._buffer = tags, ""
        self._state = self._think if begun else self._begin
        self._awaited = tags.label  # text that may begin the current part and is not part of it
        self._written = False  # whether the current part has text
        self._closes = False  # whether a closing mark may end the answer

    @property
    def over(self) -> bool:
        """Whether the reasoning is over."""
        return self._state == self._answer

    def feed(self, text: str) -> tuple[str, str]:
        """Read more text; returns the reasoning and the answer that are certain by now."""
        self._buffer += text
        if self._state == self._begin:
            self._begin()
        thought = self._think() if self._state == self._think else ""
        return thought, self._answer() if self._state == self._answer else ""

    def finish(self) -> tuple[str, str]:
        """Return the rest at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._think:
            return rest.rstrip(), ""
        return "", rest

    def _begin(self) -> str:
        """Wait until it is clear whether the opening mark comes."""
        start, mark = self._buffer.lstrip(), self._tags.begin
        if start.startswith(mark):
            self._buffer = start.removeprefix(mark)
            self._state = self._think
        elif not mark.startswith(start):
            self._state = self._answer
            self._written = True  # there is no reasoning before it, so its white space is kept
        return ""

    def _think(self) -> str:
        """Take the text up to the closing mark; white space and a part of the mark at its end are kept back."""
        if not self._begins():
            return ""
        thought, mark, rest = self._buffer.partition(self._tags.end)
        if mark:
            self._buffer, self._state, self._written = rest, self._answer, False
            self._awaited = self._tags.answer[0]
            self._closes = bool(self._awaited)
            return thought.rstrip()
        return self._but_end(self._tags.end)

    def _answer(self) -> str:
        """Take all text except the marks that may surround it."""
        if not self._begins():
            return ""
        if not self._closes:
            answer, self._buffer = self._buffer, ""
            return answer
        answer, mark, rest = self._buffer.partition(self._tags.answer[1])
        if not mark:
            return self._but_end(self._tags.answer[1])
        self._closes, self._written, self._buffer = False, False, rest
        return answer.rstrip() + self._answer()

    def _but_end(self, mark: str) -> str:
        """Take all text except white space and a part of the mark at its end."""
        text = self._buffer
        end = len(text[: len(text) - overlap(text, mark)].rstrip())
        self._buffer = text[end:]
        return text[:end]

    def _begins(self) -> bool:
        """Skip white space and ``_awaited`` at the beginning of a part; returns False if more text is needed to
        decide."""
        if not self._written:
            self._buffer = self._buffer.lstrip()
            if self._awaited and self._awaited.startswith(self._buffer) and self._buffer != self._awaited:
                return False
            self._buffer, self._awaited = self._buffer.removeprefix(self._awaited).lstrip(), ""
            self._written = bool(self._buffer)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """How answers to one request are read. ``calls`` is how calls are written, or None if there are none; for the other
    fields see `call_reader`."""

    calls: CallFormat | None = None
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The arguments' schemas of callable functions, by name."""
    single: bool = False
    certain: bool = False
    thoughts: Thoughts = "none"
    tags: Tags = THINK

    def reader(self) -> AnswerReader:
        """Make a reader for one sample."""
        return AnswerReader(self)

    def read(self, text: str) -> list[Delta]:
        """Read a whole answer."""
        reader = self.reader()
        return [*reader.feed(text), *reader.finish()]


class AnswerReader:
    """Reads one sample's text piece by piece."""

    def __init__(self, shape: AnswerShape) -> None:
        self._calls = None if shape.calls is None else _scanner(shape.calls, shape)
        self._thoughts = (
            None if shape.thoughts == "none" else ThoughtReader(shape.tags, begun=shape.thoughts == "begun")
        )

    @property
    def called(self) -> bool:
        """Whether any call has begun."""
        return self._calls is not None and self._calls.found

    def feed(self, text: str) -> list[Delta]:
        """Read more text; returns the parts that are certain by now."""
        return self._read(text) if self._thoughts is None else self._both(*self._thoughts.feed(text))

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the answer."""
        left = [] if self._thoughts is None else self._both(*self._thoughts.finish())
        return left if self._calls is None else [*left, *self._calls.finish()]

    def _both(self, thought: str, answer: str) -> list[Delta]:
        return [*([Thought(thought)] if thought else []), *self._read(answer)]

    def _read(self, answer: str) -> list[Delta]:
        if self._calls is None:
            return [Text(answer)] if answer else []
        return list(self._calls.feed(answer))


def _scanner(written: CallFormat, shape: AnswerShape) -> AnswerScanner:
    if written.style == "harmony":
        return HarmonyReader(shape.functions, single=shape.single)
    if written.style == "xml":
        return XmlCallReader(written, shape.functions, single=shape.single)
    if written.style == "keyed":
        return KeyedCallReader(written, shape.functions, single=shape.single)
    if written.style == "python":
        return PythonCallReader(written, shape.functions, single=shape.single)
    if written.tag:
        return TaggedCallReader(written, shape.functions, single=shape.single, certain=shape.certain)
    return call_reader(written, shape.functions, single=shape.single, certain=shape.certain)
