"""The forms that answers with calls, or with a schema, are held to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parlay.serve.chat.formats import PLAIN, CallFormat, format_of
from parlay.serve.chat.request import ChatRequest, Function
from parlay.types import StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer may be: the form it is held to, and how the calls in it are written (None: it has none).

    ``field`` is where the body asks for the form.
    """

    form: StructuredOutputsParams | None
    calls: CallFormat | None
    field: str = "structured_outputs"


def answer_form(chat: ChatRequest, template: str) -> AnswerForm:
    """The form that functions and schema ask for together.

    A call that must come is held to its schema, and so is one that may come where calls have no mark: there an answer
    that begins with ``{`` is a call. Marked calls that may come are read, not enforced.
    """
    schema, functions = chat.answer_schema, chat.functions
    if not functions:
        if schema is None:
            return AnswerForm(chat.params.form, None)
        return AnswerForm(StructuredOutputsParams(json=schema), None, chat.schema_field)
    field = functions[0].field if len(functions) == 1 else functions[0].field.partition("[")[0]
    if chat.must_call:
        return AnswerForm(StructuredOutputsParams(json=call_schema(functions, PLAIN.arguments)), PLAIN, field)
    shape = format_of(template)
    if schema is not None:
        grammar = f"start: answer | call\nanswer: %json {json.dumps(schema)}"
        shape, field = PLAIN, chat.schema_field
    elif not shape.begin:
        grammar = "start: text | call\ntext: /([^{](.|\\n)*)?/"
    else:
        return AnswerForm(None, shape)
    call = f"call: %json {json.dumps(call_schema(functions, shape.arguments))}"
    return AnswerForm(StructuredOutputsParams(grammar=f"{grammar}\n{call}\n"), shape, field)


def call_schema(functions: Sequence[Function], key: str) -> dict[str, Any]:
    """The schema of a call of any of ``functions``, its arguments under ``key``."""
    return {"anyOf": [_call_lock(function, place, key) for place, function in enumerate(functions)]}


def _call_lock(function: Function, place: int, key: str) -> dict[str, Any]:
    own = function.parameters
    arguments = {"properties": {}, "additionalProperties": False} if own is None else own
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            key: {"type": "object", **_moved(arguments, f"/anyOf/{place}/properties/{key}")},
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


_DATA = frozenset({"const", "default", "enum", "examples"})


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references still lead to the same parts now that its root is at ``place`` of another."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: value if key in _DATA else _reference(key, value, place) for key, value in schema.items()}


def _reference(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return f"#{place}{value[1:]}"
    return _moved(value, place)
