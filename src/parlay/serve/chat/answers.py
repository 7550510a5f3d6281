"""An answer read into what protocols tell of: reasoning, text, and calls with their arguments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from parlay.reasoning import Thoughts
from parlay.serve.chat.calls import Arguments, Begin, CallReader, Text
from parlay.serve.chat.formats import CallFormat
from parlay.serve.chat.reasoning import Thought, ThoughtReader

__all__ = ["AnswerReader", "AnswerShape", "Arguments", "Begin", "Delta", "Text", "Thought"]

Delta = Thought | Text | Begin | Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What the answers to one request may hold. ``calls`` None: there are none to be read; for the rest see
    `CallReader`.
    """

    calls: CallFormat | None = None
    names: Collection[str] = ()
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
        self._calls = (
            None
            if shape.calls is None
            else CallReader(shape.calls, shape.names, single=shape.single, certain=shape.certain)
        )
        self._thoughts = None if shape.thoughts == "none" else ThoughtReader(begun=shape.thoughts == "begun")

    @property
    def called(self) -> bool:
        """Whether any call has begun."""
        return self._calls is not None and self._calls.found

    def feed(self, text: str) -> list[Delta]:
        """What is certain now."""
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
