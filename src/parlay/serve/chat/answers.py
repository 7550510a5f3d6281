"""Splits an answer into what protocols report: reasoning, text, and calls with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parlay.serve.chat.calls import CallReader
from parlay.serve.chat.formats import CallFormat
from parlay.serve.chat.reasoning import Thought, ThoughtReader
from parlay.serve.chat.scanning import Arguments, Begin, CallScanner, Text
from parlay.serve.chat.xml_calls import XmlCallReader
from parlay.text.reasoning import Thoughts

__all__ = ["AnswerReader", "AnswerShape", "Arguments", "Begin", "Delta", "Text", "Thought"]

Delta = Thought | Text | Begin | Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What the answers to one request may hold. ``calls`` None: there are none to be read; for the rest see
    `CallReader`.
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
        self._calls = None if shape.calls is None else _call_reader(shape.calls, shape)
        self._thoughts = None if shape.thoughts == "none" else ThoughtReader(begun=shape.thoughts == "begun")

    @property
    def called(self) -> bool:
        """Whether any call has begun."""
        return self._calls is not None and self._calls.found

    def feed(self, text: str) -> list[Delta]:
        """The parts that are certain by now."""
        return self._read(text) if self._thoughts is None else self._both(*self._thoughts.feed(text))

    def finish(self) -> list[Delta]:
        """What is left when the answer is over."""
        left = [] if self._thoughts is None else self._both(*self._thoughts.finish())
        return left if self._calls is None else [*left, *self._calls.finish()]

    def _both(self, thought: str, answer: str) -> list[Delta]:
        return [*([Thought(thought)] if thought else []), *self._read(answer)]

    def _read(self, answer: str) -> list[Delta]:
        if self._calls is None:
            return [Text(answer)] if answer else []
        return list(self._calls.feed(answer))


def _call_reader(written: CallFormat, shape: AnswerShape) -> CallScanner:
    if written.style == "xml":
        return XmlCallReader(shape.functions, single=shape.single)
    return CallReader(written, shape.functions, single=shape.single, certain=shape.certain)
