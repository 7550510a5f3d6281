"""An answer read into what protocols tell of: text, and calls with their arguments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from parlay.serve.chat.calls import Arguments, Begin, CallReader, Delta, Text
from parlay.serve.chat.formats import Format

__all__ = ["AnswerReader", "AnswerShape", "Arguments", "Begin", "Delta", "Text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """What the answers to one request may hold. ``calls`` None: there are none to be read; for the rest see
    `CallReader`.
    """

    calls: Format | None = None
    names: Collection[str] = ()
    single: bool = False
    certain: bool = False

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

    @property
    def called(self) -> bool:
        """Whether any call has begun."""
        return self._calls is not None and self._calls.found

    def feed(self, text: str) -> list[Delta]:
        """What is certain now."""
        if self._calls is None:
            return [Text(text)] if text else []
        return self._calls.feed(text)

    def finish(self) -> list[Delta]:
        """What is left when the answer is over."""
        return [] if self._calls is None else self._calls.finish()
