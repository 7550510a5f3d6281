"""Reads answers in Harmony, as gpt-oss writes them: messages in channels of reasoning, of calls and of the final text.

A message is `<|channel|>`, the channel's name, perhaps ` to=functions.NAME`, `<|message|>` and its content, up to
`<|end|>`, or to `<|call|>` or `<|return|>`, which end the answer. The prompt holds the first message's beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from parlay.serve.chat.calls import HARMONY, Arguments, Begin, Text, Thought, overlap

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"to=functions\.([\w-]{1,64})")
_HEADS = (HARMONY.begin, "to=")
_LONGEST_HEAD = 400

Delta = Thought | Text | Begin | Arguments


class HarmonyReader:
    """Takes an answer piece by piece. Calls are of ``names``, one alone where ``single``; others are text.

    An answer that begins with none of the marks is text. The result does not depend on where pieces end, but for how
    it is cut.
    """

    def __init__(self, names: Collection[str], *, single: bool = False) -> None:
        self._names, self._single = names, single
        self._buffer = ""
        self._calls = 0
        self._content: Callable[[str], Delta] | None = None  # None: within a head
        self._begun = False

    @property
    def found(self) -> bool:
        """Whether any call has begun."""
        return self._calls > 0

    def feed(self, text: str) -> list[Delta]:
        """Read more text; return the parts that are certain now."""
        self._buffer += text
        return list(self._run())

    def finish(self) -> list[Delta]:
        """Return the rest when the answer is over; a head that was cut off is no text."""
        rest, self._buffer = self._buffer, ""
        if self._content is not None:
            return [self._content(rest)] if rest else []
        cut_off = self._begun or rest.lstrip().startswith(HARMONY.begin)
        return [] if not rest.strip() or cut_off else [Text(rest)]

    def _run(self) -> Iterator[Delta]:
        while self._buffer:
            length, before = len(self._buffer), self._content
            yield from self._read_head() if self._content is None else self._read_content()
            if len(self._buffer) == length and self._content is before:
                return

    def _read_head(self) -> Iterator[Delta]:
        head, mark, rest = self._buffer.partition(_MESSAGE)
        if not self._may_be_head(head.lstrip()) or (not mark and len(head) > _LONGEST_HEAD):
            self._content = Text
        elif mark:
            self._buffer = rest
            yield from self._begin(head)

    def _may_be_head(self, text: str) -> bool:
        """Whether a message's head begins so. Between messages nothing else comes."""
        return self._begun or any(text.startswith(mark) or mark.startswith(text) for mark in _HEADS)

    def _begin(self, head: str) -> Iterator[Delta]:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._begun = True
        self._content = Thought if channel is not None and channel[1] == "analysis" else Text
        if recipient is not None and recipient[1] in self._names and not (self._single and self.found):
            self._calls += 1
            self._content = self._arguments
            yield Begin(self._calls - 1, recipient[1])

    def _arguments(self, text: str) -> Arguments:
        return Arguments(self._calls - 1, text)

    def _read_content(self) -> Iterator[Delta]:
        """Up to the mark that ends the message; a part of a mark at the end is kept back."""
        assert self._content is not None, "within a message"
        ends = [(place, mark) for mark in _ENDS if self._begun and (place := self._buffer.find(mark)) >= 0]
        kept = 0 if ends or not self._begun else max(overlap(self._buffer, mark) for mark in _ENDS)
        end, mark = min(ends, default=(len(self._buffer) - kept, ""))
        text, self._buffer = self._buffer[:end], self._buffer[end + len(mark) :]
        if text:
            yield self._content(text)
        if mark:
            self._content = None
