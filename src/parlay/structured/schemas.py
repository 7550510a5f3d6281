"""Rewrites JSON schemas for the compiler, and explains the compiler's refusals in plain words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from parlay.structured.one_of import OneOf

Schema = dict[str, Any]

SPACE = r" |\n[ \t]{0,20}"
"""What may separate the parts of JSON: a space, or a line break and indentation. It is bounded, because small models
write as much whitespace as they may."""

_DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are not schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map names to schemas; the names are not keywords."""
_REMARKS = frozenset({"title", "description", "deprecated", "$comment"})
_FORMATS = re.compile(
    r"date-time|date|time|duration|(idn-)?email|(idn-)?hostname|ipv4|ipv6|[ui]ri(-reference)?|uuid|uri-template|"
    r"(relative-)?json-pointer|regex"
)
"""Formats that JSON Schema defines (2020-12, validation, section 7.3). Any other format is only a remark."""


def rewritten(part: Any, change: Callable[[Schema], Schema]) -> Any:
    """Apply a change to a schema and to all schemas in it, innermost first."""
    if isinstance(part, list):
        return [rewritten(item, change) for item in part]
    if not isinstance(part, dict):
        return part
    return change({key: _inner(key, value, change) for key, value in part.items()})


def _inner(key: str, value: Any, change: Callable[[Schema], Schema]) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: rewritten(schema, change) for name, schema in value.items()}
    return rewritten(value, change)


def restated(schema: Mapping[str, Any]) -> Schema:
    """Rewrite a schema to an equal one, without keywords that the compiler refuses: keywords without effect, and lists
    of names.

    pydantic writes such schemas for ``bytes``, ``Path``, ``SecretStr`` and a dict whose keys are an enum, zod for each
    record. An object that lists its fields gets no other fields, unless the schema allows them or combines objects.
    Small models add fields until something stops them, and other servers read schemas in this way, too. A ``oneOf``
    whose parts may overlap is passed on unchanged, and the compiler then refuses it.
    """
    result: Schema = rewritten(dict(schema), partial(_restated, root=schema))
    joined: list[Schema] = []
    rewritten(result, lambda part: _noted(part, joined))
    one_of = OneOf(schema, _as_it_is if joined else _closed, _followed)
    result = rewritten(result, one_of.told_as_any)
    return result if joined or one_of.unsure else rewritten(result, _closed)


def _as_it_is(schema: Schema) -> Schema:
    return schema


def _noted(schema: Schema, joined: list[Schema]) -> Schema:
    """Add the schema to ``joined`` if it combines several schemas, which may list an object's fields in several
    places."""
    parts, joins = schema.get("allOf"), schema.keys() & _JOINS
    several = len(joins) > 1 or (isinstance(parts, list) and len(parts) > 1)
    if several or (joins and schema.keys() & {"properties", "patternProperties", "required"}):
        joined.append(schema)
    return schema


_JOINS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"})


def _closed(schema: Schema) -> Schema:
    fields, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(fields, dict) or not isinstance(required, list) or schema.keys() & _OPEN:
        return schema
    known = all(isinstance(name, str) and name in fields for name in required)
    return {**schema, "additionalProperties": False} if known else schema


_MOST_PARTS = 1000
"""Comparisons for one value, which take two milliseconds."""


def admits(schema: Any, value: Any, root: Mapping[str, Any]) -> bool:
    """Whether a value fits a schema within the document ``root``, by types, listed values and alternatives. True if
    that is not certain, and for a schema that is wrong."""
    return not OneOf(root, _as_it_is, _followed, most=_MOST_PARTS).apart({"const": value}, schema)


def within_grammar(schema: Mapping[str, Any]) -> str:
    """Return a grammar for llguidance that follows the schema."""
    return f"%json {json.dumps({**restated(schema), 'x-guidance': {'whitespace_pattern': SPACE}})}"


def _restated(schema: Schema, root: Mapping[str, Any]) -> Schema:
    idle = [key for key, asks in _ASKS.items() if key in schema and not asks(schema[key])]
    rest = _with_bounds_apart({key: value for key, value in schema.items() if key not in idle})
    return _without_property_names(rest, root) if "propertyNames" in rest else rest


_ASKS: Mapping[str, Callable[[Any], bool]] = {
    "format": lambda value: not isinstance(value, str) or _FORMATS.fullmatch(value) is not None,
    "uniqueItems": lambda value: value is not False,
}
"""Whether a keyword has an effect, given its value."""


_NEAR, _MOST = 1e-6, 1e300


def _with_bounds_apart(schema: Schema) -> Schema:
    """Move an exclusive bound by a millionth if the compiler would allow the bound itself.

    The compiler does so for an integral bound, such as 0, if no other integer lies within the bounds, as in ``0 < x <=
    0.5``.
    """
    low = max(_numbers(schema, "minimum", "exclusiveMinimum"), default=-math.inf)
    high = min(_numbers(schema, "maximum", "exclusiveMaximum"), default=math.inf)
    if not _NEAR < high - low < 1:
        return schema
    moved = dict(schema)
    if low.is_integer() and low in _numbers(schema, "exclusiveMinimum"):
        moved["minimum"] = moved.pop("exclusiveMinimum") + _NEAR
    if high.is_integer() and high in _numbers(schema, "exclusiveMaximum"):
        moved["maximum"] = moved.pop("exclusiveMaximum") - _NEAR
    return moved


def _numbers(schema: Schema, *words: str) -> list[float]:
    """Return the values of the keywords, as far as they are numbers."""
    found = [schema.get(word) for word in words]
    plain = (value for value in found if isinstance(value, int | float) and not isinstance(value, bool))
    return [float(value) for value in plain if abs(value) < _MOST]


def _without_property_names(schema: Schema, root: Mapping[str, Any]) -> Schema:
    """Remove ``propertyNames`` if it allows any text or lists names; otherwise return the schema unchanged."""
    rest = dict(schema)
    names = _followed(rest.pop("propertyNames"), root)
    if names is True:
        return rest
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return schema
    asked = names.keys() - _REMARKS - {"type"}
    if not asked:
        return rest
    listed = names.get("enum", [names.get("const")])
    own = rest.get("properties", {})
    plain = "patternProperties" not in rest and isinstance(own, dict) and isinstance(listed, list)
    if len(asked) > 1 or not asked <= {"enum", "const"} or not plain or not own.keys() <= set(map(str, listed)):
        return schema
    value = rest.get("additionalProperties", True)
    properties = {name: own.get(name, value) for name in listed if isinstance(name, str)}
    return {**rest, "properties": properties, "additionalProperties": False}


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference into the same document; return anything else unchanged."""
    if not isinstance(schema, dict) or schema.keys() - _REMARKS != {"$ref"}:
        return schema
    found: Any = root
    for name in str(schema["$ref"]).removeprefix("#/").split("/"):
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return schema
    return found


_REFUSALS = (
    (re.compile(r"Unimplemented keys: \[(.*?)\]"), "has {}, which can't be enforced: remove it"),
    (re.compile(r"Unknown format: (\S+)"), 'has the format "{}", which can\'t be enforced: remove it'),
    (re.compile(r"(oneOf) constraints are not supported"), "has {} whose parts may fit one text: write anyOf"),
    (
        re.compile(r"(look-?around|backreference)s?\b"),
        "has an expression with {}s, which can't be used: remove them",
    ),
)


def in_plain_words(reason: str) -> str | None:
    """Explain what the compiler does not support, in a clause that follows the field's name. None for any other
    error."""
    found = ((pattern.search(reason), words) for pattern, words in _REFUSALS)
    return next((words.format(match[1].replace("look-around", "lookaround")) for match, words in found if match), None)
