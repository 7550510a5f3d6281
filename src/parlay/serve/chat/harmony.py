"""Reads answers in Harmony, gpt-oss's format: messages in channels for reasoning, calls and the final text.

A message is `<|channel|>`, the channel's name, optionally ` to=functions.NAME`, `<|message|>` and its content, up to
`<|end|>`, or up to `<|call|>` or `<|return|>`, which end the answer. The prompt contains the beginning of the first
message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from parlay.serve.chat.calls import HARMONY, AnswerScanner, Delta, Text, Thought

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"to=functions\.([\w-]{1,64})")
_HEADS = (HARMONY.begin, "to=", _MESSAGE)
_LONGEST_HEAD = 400


class HarmonyReader(AnswerScanner):
    """Reads an answer in Harmony; one that begins with none of the marks is text."""

    def __init__(self, names: Collection[str], *, single: bool = False) -> None:
        super().__init__(names, self._read_head, single=single)
        self._content: Callable[[str], Delta] = Text
        self._begun = False

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the answer; a header that was cut off is dropped."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._read_content:
            return [self._content(rest)] if rest else []
        cut_off = self._begun or rest.lstrip().startswith(HARMONY.begin)
        return [] if not rest.strip() or cut_off else [Text(rest)]

    def _read_head(self) -> Iterator[Delta]:
        head, mark, rest = self._buffer.partition(_MESSAGE)
        if not self._may_be_head(head.lstrip()) or (not mark and len(head) > _LONGEST_HEAD):
            self._content, self._state = Text, self._read_content
        elif mark:
            self._buffer, self._begun = rest, True
            yield from self._begin_message(head)

    def _may_be_head(self, text: str) -> bool:
        """Whether ``text`` may begin a message's header. Only headers come between messages."""
        return self._begun or any(text.startswith(mark) or mark.startswith(text) for mark in _HEADS)

    def _begin_message(self, head: str) -> Iterator[Delta]:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and self._callable(recipient[1]):
            self._content = self._arguments
            yield self._begin(recipient[1], self._read_content)
        else:
            self._content = Thought if channel is not None and channel[1] == "analysis" else Text
            self._state = self._read_content

    def _read_content(self) -> Iterator[Delta]:
        """Take the content up to the mark that ends the message; a part of a mark at the end is kept back."""
        text, mark = self._up_to(_ENDS if self._begun else ())
        if text:
            yield self._content(text)
        if mark:
            self._state = self._read_head
