"""Reads calls that models of the family Qwen3-Coder write: a tag for the function, and one for each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from parlay.serve.chat.calls import CallScanner, Delta
from parlay.serve.protocol.json_values import read_value

BEGIN = "<tool_call>"
_HEAD = re.compile(r"<tool_call>\s*<function=([^>\n]{1,64})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>\n?(.*?)\n?</parameter>", re.DOTALL)
_TAIL = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_LONGEST_HEAD = 200


class XmlCallReader(CallScanner):
    """Parameters become JSON by their types in the function's schema.

    ``functions`` are the schemas by name. A parameter is told as soon as it is whole. One that is cut off is left out.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], *, single: bool = False) -> None:
        super().__init__((BEGIN,), functions, single=single)
        self._functions = functions
        self._schema: Mapping[str, Any] = {}
        self._told: list[str] = []

    def _cut_off(self, rest: str) -> bool:
        return self._state in (self._read_parameters, self._read_end)

    def _read_head(self) -> Iterator[Delta]:
        head = _HEAD.match(self._buffer)
        if head is not None and self._callable(head[1]):
            self._take(head.end())
            self._schema, self._told = self._functions[head[1]], []
            yield self._begin(head[1], self._read_parameters)
        elif head is not None or not self._may_be_head():
            yield self._no_call()

    def _may_be_head(self) -> bool:
        rest = self._buffer.removeprefix(BEGIN).lstrip()
        mark = "<function="
        return len(rest) < _LONGEST_HEAD and (mark.startswith(rest) or rest.startswith(mark)) and ">" not in rest

    def _read_parameters(self) -> Iterator[Delta]:
        parameter, tail = _PARAMETER.match(self._buffer), _TAIL.match(self._buffer)
        if parameter is not None:
            self._take(parameter.end())
            name = json.dumps(parameter[1], ensure_ascii=False)
            yield self._arguments(f"{', ' if self._told else '{'}{name}: {self._value(parameter[1], parameter[2])}")
            self._told.append(parameter[1])
        elif tail is not None:
            self._take(tail.end())
            yield self._arguments("}" if self._told else "{}")
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
                return json.dumps(read_value(text), ensure_ascii=False)
            except ValueError:
                pass
        return json.dumps(text, ensure_ascii=False)
