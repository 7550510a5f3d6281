"""Reasoning that models write before an answer, read apart from it."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.serve.chat.scanning import overlap
from parlay.text.reasoning import BEGIN, END, Thoughts


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


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
        """What is left when the answer is over."""
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
