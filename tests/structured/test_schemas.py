"""Schemas as pydantic and zod write them: what they can't be held to is refused by name, and the rest holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from parlay.serve.chat.job import call_schema
from parlay.serve.chat.request import Function
from parlay.structured.definition import definition, matcher
from parlay.structured.schemas import restated
from parlay.types import StructuredOutputsParams

BYTES = LLTokenizer("byte")
COLOURS = {"enum": ["red", "blue"], "title": "Colour", "type": "string"}


def allows(schema: dict[str, Any], value: object) -> bool:
    at = matcher(BYTES, definition(StructuredOutputsParams(json=schema)))
    text = json.dumps(value)
    return at.try_consume_tokens(BYTES.tokenize_str(text)) == len(text) and at.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "password", "writeOnly": True}, ["x"], [1]),
        ({"type": "string", "format": "date"}, ["2026-11-28"], ["x"]),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], [["a"]]),
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
            [{"a": 1}],
            [{"a": "b"}],
        ),
        (
            {
                "$defs": {"Colour": COLOURS},
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/Colour"},
                "additionalProperties": {"type": "integer"},
            },
            [{"red": 1, "blue": 2}, {}],
            [{"green": 1}, {"red": "a"}],
        ),
        (
            {"type": "object", "propertyNames": COLOURS, "required": ["red"], "properties": {"red": {"const": 1}}},
            [{"red": 1, "blue": {}}],
            [{"red": 2}, {"blue": 1}, {"red": 1, "green": 1}],
        ),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.5, 0.1, 0.001], [0, 0.0, -0.1, 0.51, 1]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, [1.25], [1, 1.0, 1.5]),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, [-1.2], [-1, -1.0, -0.9, -1.6]),
        (
            {"properties": {"format": {"type": "string"}, "uniqueItems": False}, "additionalProperties": True},
            [{"format": "x"}],
            [{"format": 1}, {"uniqueItems": 1}],
        ),
    ],
)
def test_words_that_ask_for_nothing_and_lists_of_names_are_taken(
    schema: dict[str, Any], good: list[object], bad: list[object]
) -> None:
    assert [value for value in good if not allows(schema, value)] == []
    assert [value for value in bad if allows(schema, value)] == []


def test_a_bound_that_no_number_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="number out of range"):
        definition(StructuredOutputsParams(json={"type": "number", "exclusiveMinimum": 0, "maximum": 10**400}))


def test_an_object_that_lists_its_fields_has_no_others_unless_the_schema_says_so() -> None:
    flag = {"type": "boolean"}
    listed: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": flag}}}}
    assert allows(listed, {"a": {"b": True}})
    assert not allows(listed, {"a": {"b": True, "c": 1}})
    assert not allows({"anyOf": [listed, {"type": "null"}]}, {"more": 1})
    assert allows({**listed, "additionalProperties": {"type": "integer"}}, {"more": 1})
    assert allows({"type": "object", "required": ["more"], "properties": {}}, {"more": 1})
    parts = [{"$ref": "#/$defs/a"}, {"type": "object", "properties": {"b": flag}, "required": ["b"]}]
    together = {"allOf": parts, "$defs": {"a": {"type": "object", "properties": {"a": flag}}}}
    assert allows(together, {"a": True, "b": True})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, 'has "uniqueItems", which can\'t be enforced: remove it'),
        ({"type": "object", "propertyNames": {"minLength": 2}}, 'has "propertyNames", which can'),
        ({"type": "object", "propertyNames": COLOURS, "properties": {"a": {}}}, 'has "propertyNames", which can'),
        ({"type": "string", "format": "iri"}, 'has the format "iri", which can\'t be enforced: remove it'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "has oneOf whose parts may fit one text: write anyOf"),
        ({"type": "string", "pattern": "^(?!a).*$"}, "has an expression with lookarounds, which can't be used"),
        ({"type": "string", "pattern": r"^(a)\1$"}, "has an expression with backreferences, which can't be used"),
    ],
)
def test_what_no_answer_can_be_held_to_is_refused_by_name(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="structured_outputs ") as caught:
        allows(schema, None)
    assert str(caught.value).startswith(f"structured_outputs {message}")


def test_references_of_a_function_lead_on_whatever_its_fields_are_called() -> None:
    """``examples`` and ``default`` are words of schemas, and fields of some functions."""
    item = {"$ref": "#/$defs/Colour"}
    parameters = {
        "type": "object",
        "properties": {"examples": {"type": "array", "items": item}, "default": item},
        "additionalProperties": {"propertyNames": item},
        "$defs": {"Colour": COLOURS},
    }
    schema = call_schema([Function("paint", None, parameters)], "arguments")
    assert allows(schema, {"name": "paint", "arguments": {"examples": ["red"], "default": "blue"}})
    assert not allows(schema, {"name": "paint", "arguments": {"examples": ["green"]}})
    assert not allows(schema, {"name": "paint", "arguments": {"more": {"green": 1}}})
    assert restated(schema) != schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": 5},
        {"properties": {}, "required": 5},
        {"properties": {}, "required": [{}]},
        {"properties": 5},
        {"propertyNames": 5},
        {"propertyNames": {"enum": 5}},
        {"propertyNames": {"$ref": 5}},
        {"propertyNames": {"$ref": "#/a/b"}, "a": []},
        {"format": []},
    ],
)
def test_a_schema_that_is_wrong_is_a_value_error(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^structured_outputs "):
        allows(schema, {})
