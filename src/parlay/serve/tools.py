"""Tools: how they and the calls of them are written for a model, and the forms that calls are held to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parlay.requests import Tools
from parlay.serve.bodies.chat import AssistantMessage, ChatBody, JsonObjectFormat, JsonSchemaFormat, Message, Tool
from parlay.serve.bodies.common import text_of
from parlay.serve.errors import ApiError
from parlay.types import StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes a call: ``begin``, a JSON object of name and ``arguments``, ``end``.

    Where ``begin`` is empty, an answer is a call from its first character on, or none at all.
    """

    mark: str
    """What the chat templates of the family hold."""
    begin: str
    end: str
    arguments: str
    """The key under which the arguments stand."""


PLAIN = Format("", "", "", "arguments")
FORMATS = (
    Format("<tool_call>", "<tool_call>", "</tool_call>", "arguments"),  # Hermes, Qwen
    Format('"parameters"', "", "", "parameters"),  # Llama 3
)


def format_of(template: str) -> Format:
    """The format that a chat template speaks of; a template without tools gets the plain one."""
    if not takes_tools(template):
        return PLAIN
    return next((known for known in FORMATS if known.mark in template), PLAIN)


def takes_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


# ------------------------------------------------------------------------------------------------------ conversation


def conversation(body: ChatBody, template: str) -> tuple[list[dict[str, Any]], Tools]:
    """Messages and tools as the template takes them. One that knows no tools is told of them in a system message.

    Raises ApiError for an earlier call whose arguments are no JSON object.
    """
    shape = format_of(template)
    own_calls = "tool_calls" in template
    messages = [_message(message, place, shape, own_calls=own_calls) for place, message in enumerate(body.messages)]
    tools = [tool.model_dump(exclude_none=True) for tool in body.callable_tools]
    if tools and not takes_tools(template):
        return _told(messages, tools), ()
    return messages, tools


def _message(message: Message, place: int, shape: Format, *, own_calls: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if not isinstance(message, AssistantMessage):
        return plain if message.role != "tool" else plain | {"tool_call_id": message.tool_call_id}
    calls = _calls(message, place)
    if own_calls and calls:
        plain["tool_calls"] = calls
    elif calls:
        plain["content"] += "\n".join(_written(call["function"], shape) for call in calls)
    return plain


def _calls(message: AssistantMessage, place: int) -> list[dict[str, Any]]:
    """With their arguments read, as chat templates want them."""
    result = []
    for number, call in enumerate(message.tool_calls or ()):
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            field = f"messages.{place}.tool_calls.{number}.function.arguments"
            raise ApiError(400, f"{field} must be a JSON object, written as text", field)
        function = {"name": call.function.name, "arguments": arguments}
        result.append({"id": call.id, "type": "function", "function": function})
    return result


def _written(function: Mapping[str, Any], shape: Format) -> str:
    call = {"name": function["name"], shape.arguments: function["arguments"]}
    text = json.dumps(call, ensure_ascii=False)
    return f"{shape.begin}\n{text}\n{shape.end}" if shape.begin else text


def _told(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as a part of the first system message, or as one of their own."""
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    text = f'You can call these functions. A call is {{"name": ..., "arguments": {{...}}}} and nothing else.\n{listed}'
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


# -------------------------------------------------------------------------------------------------------------- forms


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answer may be: the form it is held to, and how the calls in it are written (None: it has none)."""

    form: StructuredOutputsParams | None
    calls: Format | None


def answer_form(body: ChatBody, template: str) -> Answer:
    """The form that ``response_format``, ``tools`` and ``tool_choice`` ask for together.

    A call that must come is held to its schema, and so is one that may come where calls have no mark: there an answer
    that begins with ``{`` is a call. Marked calls that may come are read, not enforced.
    """
    schema = _answer_schema(body)
    tools = body.callable_tools
    if not tools:
        return Answer(None if schema is None else StructuredOutputsParams(json=schema), None)
    if body.must_call:
        return Answer(StructuredOutputsParams(json=call_schema(tools, PLAIN.arguments)), PLAIN)
    shape = format_of(template)
    if schema is not None:
        grammar = f"start: answer | call\nanswer: %json {json.dumps(schema)}"
        shape = PLAIN
    elif not shape.begin:
        grammar = "start: text | call\ntext: /([^{](.|\\n)*)?/"
    else:
        return Answer(None, shape)
    call = f"call: %json {json.dumps(call_schema(tools, shape.arguments))}"
    return Answer(StructuredOutputsParams(grammar=f"{grammar}\n{call}\n"), shape)


def _answer_schema(body: ChatBody) -> Mapping[str, Any] | None:
    wanted = body.response_format
    if isinstance(wanted, JsonSchemaFormat) and wanted.json_schema.schema_ is not None:
        return wanted.json_schema.schema_
    return {"type": "object"} if isinstance(wanted, JsonObjectFormat | JsonSchemaFormat) else None


def call_schema(tools: Sequence[Tool], key: str) -> dict[str, Any]:
    """The schema of a call of any of ``tools``, its arguments under ``key``."""
    return {"anyOf": [_one_call(tool, place, key) for place, tool in enumerate(tools)]}


def _one_call(tool: Tool, place: int, key: str) -> dict[str, Any]:
    own = tool.function.parameters
    arguments = {"properties": {}, "additionalProperties": False} if own is None else own
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
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
