"""Proves that the parts of `oneOf` in a JSON schema are disjoint: a grammar can't count the parts that a text fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any

Schema = dict[str, Any]

_KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MOST = 50_000
"""The most comparisons, which take about a tenth of a second."""
_DEEPEST = 32
_UNREAD = frozenset({"patternProperties", "propertyNames", "unevaluatedProperties"})
"""Keywords about unlisted fields. This module does not read them."""


class OneOf:
    """Finds out whether the parts of each ``oneOf`` are disjoint: by types, constants, and the fields of objects.

    ``root``: the document that references point into. ``closed``: the schema that a text's objects really follow, if
    that is stricter than the given one. ``follow`` resolves a reference. After ``most`` comparisons nothing more counts
    as disjoint.
    """

    def __init__(
        self,
        root: Mapping[str, Any],
        closed: Callable[[Schema], Schema],
        follow: Callable[[Any, Mapping[str, Any]], Any],
        *,
        most: int = _MOST,
    ) -> None:
        self._root = root
        self._closed = closed
        self._follow = follow
        self._left = most
        self.unsure = False
        """Whether a ``oneOf`` was left as it is, because its parts may overlap."""

    def told_as_any(self, schema: Schema) -> Schema:
        """Replace ``oneOf`` by ``anyOf`` if no text can fit two parts, so that both mean the same."""
        parts = schema.get("oneOf")
        if not isinstance(parts, list) or not parts:
            return schema
        if "anyOf" in schema or not all(self.apart(one, other) for one, other in permutations(parts, 2)):
            self.unsure = True
            return schema
        return {("anyOf" if word == "oneOf" else word): value for word, value in schema.items()}

    def apart(self, text: Any, other: Any) -> bool:
        """Whether no text that follows the schema ``text`` fits ``other``. False if that is not certain."""
        return self._apart(text, other, 0)

    def _apart(self, text: Any, other: Any, depth: int) -> bool:
        self._left -= 1
        if text is False or other is False:
            return True
        if not isinstance(text, dict) or not isinstance(other, dict) or self._left < 0 or depth > _DEEPEST:
            return False
        return (
            self._apart_by_words(text, other, depth + 1)
            or any(all(self._apart(part, other, depth + 1) for part in parts) for parts in self._readings(text))
            or any(all(self._apart(text, part, depth + 1) for part in parts) for parts in self._readings(other))
        )

    def _readings(self, schema: Schema) -> Iterator[list[Any]]:
        """Yield lists of schemas. Any value that fits ``schema`` fits at least one schema of each list."""
        followed = self._follow(schema, self._root)
        if followed is not schema:
            yield [followed]
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                yield schema[word]
        every = schema.get("allOf")
        yield from ([part] for part in every) if isinstance(every, list) else ()

    def _apart_by_words(self, text: Schema, other: Schema, depth: int) -> bool:
        ours, theirs = _values(text), _values(other)
        self._left -= len(ours or ()) + len(theirs or ())
        if ours is not None and theirs is not None and not ours & theirs:
            return True
        common = _kinds(text) & _kinds(other)
        return not common or (common == {"object"} and self._apart_by_a_field(text, other, depth))

    def _apart_by_a_field(self, text: Schema, other: Schema, depth: int) -> bool:
        """Whether some required field of one object can't have a value that fits both."""
        text = self._closed(text)
        names = [*_required(text), *_required(other)]
        return any(self._apart(_field(text, name), _field(other, name), depth) for name in names)


def _values(schema: Schema) -> set[str] | None:
    """Return all values that the schema allows, each as JSON; None if the schema does not list its values."""
    if "const" in schema:
        return {_spelled(schema["const"])}
    listed = schema.get("enum")
    return {_spelled(value) for value in listed} if isinstance(listed, list) else None


def _spelled(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """Turn integral floats in a value into integers: 1.0 is 1 in JSON Schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def _kinds(schema: Schema) -> frozenset[str]:
    named = schema.get("type", [*_KINDS])
    words = [named] if isinstance(named, str) else named
    if not isinstance(words, list):
        return _KINDS
    kinds = frozenset("number" if word == "integer" else word for word in words if isinstance(word, str))
    if "const" in schema:
        return kinds & {_kind(schema["const"])}
    listed = schema.get("enum")
    return kinds & {_kind(value) for value in listed} if isinstance(listed, list) else kinds


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str):
        return "string"
    return "number" if isinstance(value, int | float) else "array" if isinstance(value, list) else "object"


def _required(schema: Schema) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _field(schema: Schema, name: str) -> Any:
    """Return the schema of a field's value; True if any value is allowed, False if the field is not."""
    fields = schema.get("properties")
    if isinstance(fields, dict) and name in fields:
        return fields[name]
    return True if schema.keys() & _UNREAD else schema.get("additionalProperties", True)
