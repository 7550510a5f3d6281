"""Reads calls written with a tag for the function and one for each parameter: Qwen3-Coder, Seed-OSS and GLM-4.5."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parlay.serve.chat.calls import CallFormat, Delta, FieldCallReader
from parlay.serve.protocol.json_values import read_value
from parlay.structured.schemas import admits

_LONGEST_HEAD = 200


@dataclass(frozen=True, slots=True)
class _Tags:
    """Patterns of the tags within the outer one: ``head`` begins with ``mark``, or with the bare name if ``mark`` is
    empty. A ``parameter`` ends in ``close``."""

    mark: str
    head: re.Pattern[str]
    close: str
    parameter: re.Pattern[str]
    tail: re.Pattern[str]


_NAMED = _Tags(
    "<function=",
    re.compile(r"\s*<function=([^>\n]{1,64})>"),
    "</parameter>",
    re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?(.*?)\n?</parameter>", re.DOTALL),
    re.compile(r"\s*</function>"),
)
_PAIRED = _Tags(
    "",
    re.compile(r"\s*([\w.-]{1,64})\s*?(?=\n|<arg_key>|</)"),
    "</arg_value>",
    re.compile(r"\s*<arg_key>([^<\n]{1,256})</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    re.compile(r"\s*(?=</tool_call>)"),
)


class XmlCallReader(FieldCallReader):
    """Reads tagged calls; the function's schema says which parameters become JSON. ``functions`` are the schemas by
    name."""

    def __init__(
        self, written: CallFormat, functions: Mapping[str, Mapping[str, Any]], *, single: bool = False
    ) -> None:
        super().__init__((written.begin,), functions, single=single, end=written.end)
        self._functions = functions
        self._tags = _PAIRED if written.mark == "<arg_key>" else _NAMED
        self._schema: Mapping[str, Any] = {}
        self._searched = 0
        """Characters of the buffer in which no parameter's closing tag begins."""

    def _cut_off(self, rest: str) -> bool:
        return super()._cut_off(rest) or self._state in (self._read_fields, self._read_end)

    def _read_head(self) -> Iterator[Delta]:
        head = self._tags.head.match(self._buffer, len(self._mark))
        if head is not None and self._callable(head[1]):
            self._take(head.end())
            self._schema = self._functions[head[1]]
            yield self._head_read(head[1])
        elif head is not None or not self._may_be_head():
            yield self._no_call()

    def _may_be_head(self) -> bool:
        rest, mark = self._buffer[len(self._mark) :].lstrip(), self._tags.mark
        if not mark:
            return re.fullmatch(r"[\w.-]{0,64}\s*(<(a(r(g(_\w*)?)?)?)?)?", rest) is not None
        return len(rest) < _LONGEST_HEAD and (mark.startswith(rest) or rest.startswith(mark)) and ">" not in rest

    def _read_fields(self) -> Iterator[Delta]:
        parameter, tail = self._parameter(), self._tags.tail.match(self._buffer)
        if parameter is not None:
            self._take(parameter.end())
            yield self._tell(parameter[1], self._value(parameter[1], parameter[2]))
        elif tail is not None:
            self._take(tail.end())
            yield self._told_all(self._read_end)

    def _parameter(self) -> re.Match[str] | None:
        """The next parameter, if it is complete. However many pieces it comes in, it is searched once."""
        close = self._tags.close
        if self._buffer.find(close, self._searched) < 0:
            self._searched = max(0, len(self._buffer) - len(close) + 1)
            return None
        self._searched = 0
        return self._tags.parameter.match(self._buffer)

    def _value(self, name: str, text: str) -> str:
        """A parameter's value as JSON: a string if the text is not JSON, or if the schema admits only a string."""
        properties = self._schema.get("properties")
        own = properties.get(name) if isinstance(properties, Mapping) else None
        if not isinstance(own, Mapping) or own.get("type") != "string":
            try:
                value = read_value(text)
            except ValueError:
                value = text
            if admits(own, value, self._schema) or not admits(own, text, self._schema):
                return json.dumps(value, ensure_ascii=False)
        return json.dumps(text, ensure_ascii=False)
