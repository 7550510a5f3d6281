"""Checks the size of a constraint before it is compiled, and explains the compiler's own limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parlay.types import FieldError, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

BYTES = 1024 * 1024
RULES = 5_000
CHOICES = 20_000
LEVELS = 100
REFERENCES = 5_000
NAMES = 10_000

_SHOWN = 300
_RULE = re.compile(r"^\s*[?!]?[\w.-]+\s*(?:::=|[:\[])", re.MULTILINE)

_PICTURE = re.compile(r"\s*(\d+ \||\|?\s*\^+\s*$)")
"""Matches a line that quotes the definition, or points into it."""


def check_size(wanted: StructuredOutputsParams) -> None:
    """Raise ValueError if a number exceeds its limit; the message names both."""
    if wanted.choice is not None:
        _check("choice", len(wanted.choice), CHOICES, "texts")
        _check_bytes("choice", "".join(wanted.choice))
    if wanted.regex is not None:
        _check_bytes("regex", wanted.regex)
    if wanted.grammar is not None:
        _check_bytes("grammar", wanted.grammar)
        _check("grammar", sum(1 for _ in _RULE.finditer(wanted.grammar)), RULES, "rules")
    if wanted.json is not None:
        _check_schema(schema_of(wanted.json))


def schema_of(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema as data; the text ``true`` is the schema that any JSON follows. Raises ValueError if it is not
    JSON, or no schema that a text can follow."""
    try:
        schema = json.loads(given) if isinstance(given, str) else dict(given)
    except (ValueError, RecursionError) as error:
        raise FieldError("structured_outputs.json", f"is not JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise FieldError("structured_outputs.json", "is a schema that no text follows: give another")
    if not isinstance(schema, dict):
        raise FieldError("structured_outputs.json", "must be a JSON schema, which is an object")
    return schema


def _check_schema(schema: dict[str, Any]) -> None:
    """Check sizes level by level, so that a deep schema can't exhaust the stack."""
    references = names = depth = 0
    level: list[Any] = [schema]
    while level:
        depth += 1
        _check("json", depth, LEVELS, "levels")
        for item in level:
            if isinstance(item, dict):
                references += isinstance(item.get("$ref"), str)
                named = (item.get("properties"), item.get("required"))
                names += sum(len(each) for each in named if isinstance(each, dict | list))
        level = [inner for item in level if isinstance(item, dict | list) for inner in _inside(item)]
    _check("json", references, REFERENCES, "references")
    _check("json", names, NAMES, "names in properties and required")
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise FieldError("structured_outputs.json", f"is not JSON: {error}") from None
    _check_bytes("json", text)


def _inside(item: dict[str, Any] | list[Any]) -> list[Any]:
    return list(item.values()) if isinstance(item, dict) else item


def _check_bytes(field: str, text: str) -> None:
    _check(field, len(text.encode(errors="replace")), BYTES, "bytes")


def _check(field: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise FieldError(f"structured_outputs.{field}", f"has {count} {what}, and the limit is {most}: make it smaller")


def in_one_line(reason: str) -> str:
    """Put an error into one line, without the parser's state, the quoted definition, and details of an internal
    fault."""
    lines = reason.partition("<state>")[0].splitlines()
    message = " ".join(" ".join(line for line in lines if not _PICTURE.match(line)).split())
    if "panic" in message.partition(":")[0]:
        return "this is more than its compiler can hold"
    return message if len(message) <= _SHOWN else message[:_SHOWN] + "..."


def limit_reached(matcher: LLMatcher) -> str | None:
    """Return the library's limit at which a matcher failed; None if it has not failed, has ended, or is at a dead
    end."""
    reason = matcher.get_error() if matcher.is_error() else ""
    return None if not reason or reason.startswith("NoExtension") else in_one_line(reason)
