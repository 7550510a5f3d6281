"""Reads calls written with a tag for the function and one for each parameter: Qwen3-Coder, Seed-OSS and GLM-4.5."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parlay.serve.chat.calls import CallFormat, Delta, FieldCallReader
from parlay.serve.protocol.json_values import read_value

_LONGEST_HEAD = 200


@dataclass(frozen=True, slots=True)
class _Tags:
    """Patterns of the tags within the outer one: ``head`` begins with ``mark``, or with the bare name if ``mark`` is
    empty."""

    mark: str
    head: re.Pattern[str]
    parameter: re.Pattern[str]
    tail: re.Pattern[str]


_NAMED = _Tags(
    "<function=",
    re.compile(r"\s*<function=([^>\n]{1,64})>"),
    re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?(.*?)\n?</parameter>", re.DOTALL),
    re.compile(r"\s*</function>"),
)
_PAIRED = _Tags(
    "",
    re.compile(r"\s*([\w.-]{1,64})\s*?(?=\n|<arg_key>|</)"),
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
        parameter, tail = self._tags.parameter.match(self._buffer), self._tags.tail.match(self._buffer)
        if parameter is not None:
            self._take(parameter.end())
            yield self._tell(parameter[1], self._value(parameter[1], parameter[2]))
        elif tail is not None:
            self._take(tail.end())
            yield self._told_all(self._read_end)

    def _value(self, name: str, text: str) -> str:
        """A parameter's value as JSON: a string if the schema says so or if the text is not JSON."""
        properties = self._schema.get("properties")
        own = properties.get(name) if isinstance(properties, Mapping) else None
        kinds = own.get("type") if isinstance(own, Mapping) else None
        if kinds != "string":
            try:
                return json.dumps(read_value(text), ensure_ascii=False)
            except ValueError:
                pass
        return json.dumps(text, ensure_ascii=False)
