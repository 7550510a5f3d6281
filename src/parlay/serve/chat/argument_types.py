"""Whether a parameter's schema admits a value, for notations that write strings and numbers alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from parlay.structured.schemas import followed

_MOST = 64
"""Parts of a schema that are looked at; further ones admit every value. References may make endlessly many of them."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}


def admits(schema: Any, value: Any, root: Mapping[str, Any]) -> bool:
    """Whether the schema's types, listed values and alternatives admit a value; other keywords are not looked at.

    ``root`` is the schema into which references lead. Wrong schemas admit every value.
    """
    return _admits(schema, value, root, iter(range(_MOST)))


def _admits(schema: Any, value: Any, root: Mapping[str, Any], parts: Iterator[int]) -> bool:
    """`admits`, for the parts that are left."""
    schema = followed(schema, root)
    if next(parts, None) is None or not isinstance(schema, Mapping):
        return schema is not False
    types, listed = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    names = types if isinstance(types, list) else [types]
    known = [_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES]
    if known and not any(fits(value) for fits in known):
        return False
    if isinstance(listed, list) and json.dumps(value) not in map(json.dumps, listed):
        return False
    joins = {word: schema[word] for word in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(word), list)}
    return all(
        (all if word == "allOf" else any)(_admits(part, value, root, parts) for part in each)
        for word, each in joins.items()
    )
