"""Reads calls that models of the family Qwen3-Coder write: a tag for the function, and one for each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from parlay.serve.chat.calls import Arguments, Begin, Delta, Text, overlap

BEGIN = "<tool_call>"
_HEAD = re.compile(r"<tool_call>\s*<function=([^>\n]{1,64})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?(.*?)\n?</parameter>", re.DOTALL)
_TAIL = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_LONGEST_HEAD = 200


class XmlCallReader:
    """Takes an answer piece by piece, as `CallReader`. Parameters become JSON by their types in the function's schema.

    ``functions`` are the schemas by name. A parameter is told as soon as it is whole. One that is cut off is left out.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], *, single: bool = False) -> None:
        self._functions = functions
        self._single = single
        self._buffer = ""
        self._calls = 0
        self._state = self._search
        self._schema: Mapping[str, Any] = {}
        self._told: list[str] = []

    @property
    def found(self) -> bool:
        """Whether any call has begun."""
        return self._calls > 0

    def feed(self, text: str) -> list[Delta]:
        """What is certain now."""
        self._buffer += text
        return list(self._run())

    def finish(self) -> list[Delta]:
        """What is left when the answer is over."""
        rest, self._buffer = self._buffer, ""
        in_call = self._state in (self._read_parameters, self._read_end)
        return [] if in_call or not rest or (self.found and not rest.strip()) else [Text(rest)]

    def _run(self) -> Iterator[Delta]:
        """Until nothing more can be said without more text."""
        while self._buffer:
            state, length = self._state, len(self._buffer)
            yield from self._state()
            if self._state == state and len(self._buffer) == length:
                return

    def _search(self) -> Iterator[Delta]:
        """Text, up to the next mark of a call. Space between calls is dropped."""
        place = self._buffer.find(BEGIN)
        end = place if place >= 0 else len(self._buffer) - overlap(self._buffer, BEGIN)
        between = self.found and not self._buffer[:end].strip()
        if between and place < 0:
            return
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if text and not between:
            yield Text(text)
        if place >= 0:
            self._state = self._read_head

    def _read_head(self) -> Iterator[Delta]:
        head = _HEAD.match(self._buffer)
        if head is not None and head[1] in self._functions and not (self._single and self.found):
            self._buffer = self._buffer[head.end() :]
            self._schema, self._told = self._functions[head[1]], []
            self._calls += 1
            self._state = self._read_parameters
            yield Begin(self._calls - 1, head[1])
        elif head is not None or not self._may_be_head():
            yield Text(BEGIN)
            self._buffer = self._buffer.removeprefix(BEGIN)
            self._state = self._search

    def _may_be_head(self) -> bool:
        rest = self._buffer.removeprefix(BEGIN).lstrip()
        mark = "<function="
        return len(rest) < _LONGEST_HEAD and (mark.startswith(rest) or rest.startswith(mark)) and ">" not in rest

    def _read_parameters(self) -> Iterator[Delta]:
        call = self._calls - 1
        parameter, tail = _PARAMETER.match(self._buffer), _TAIL.match(self._buffer)
        if parameter is not None:
            self._buffer = self._buffer[parameter.end() :]
            name = json.dumps(parameter[1], ensure_ascii=False)
            yield Arguments(call, f"{', ' if self._told else '{'}{name}: {self._value(parameter[1], parameter[2])}")
            self._told.append(parameter[1])
        elif tail is not None:
            self._buffer = self._buffer[tail.end() :]
            yield Arguments(call, "}" if self._told else "{}")
            self._state = self._read_end

    def _read_end(self) -> Iterator[Delta]:
        """The mark that ends a call, which may come later than its tail."""
        end, rest = "</tool_call>", self._buffer.lstrip()
        if end.startswith(rest) and rest != end:
            return
        self._buffer = rest.removeprefix(end) if rest.startswith(end) else self._buffer
        self._state = self._search
        yield from ()

    def _value(self, name: str, text: str) -> str:
        """A text where the schema says so, or where it is no JSON."""
        properties = self._schema.get("properties")
        own = properties.get(name) if isinstance(properties, Mapping) else None
        kinds = own.get("type") if isinstance(own, Mapping) else None
        if kinds != "string":
            try:
                return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)
