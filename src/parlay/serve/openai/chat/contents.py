"""Translates messages, functions and schema of a chat body to those of a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parlay.serve.chat.request import ChatMessage, Function, PastCall
from parlay.serve.errors import ApiError
from parlay.serve.openai.chat.body import (
    AssistantMessage,
    ChatBody,
    FunctionMessage,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    ToolMessage,
    UserMessage,
)
from parlay.serve.protocol.body import text_of
from parlay.serve.protocol.json_values import read_value
from parlay.serve.protocol.sampling_from_body import FieldNames

NAMES = FieldNames.of(ChatBody, "messages")
_LEGACY_ID = "call_0"
"""The id of calls in the older form, which have none."""


def read_messages(body: ChatBody) -> tuple[ChatMessage, ...]:
    """Translate the messages. Raises ApiError for an earlier call whose arguments are not a JSON object."""
    return tuple(_message(message, place) for place, message in enumerate(body.messages))


def read_functions(body: ChatBody) -> tuple[Function, ...]:
    """The functions that may be called."""
    functions = body.callable_functions.items()
    return tuple(Function(one.name, one.description, one.parameters, field) for field, one in functions)


def _message(message: Message, place: int) -> ChatMessage:
    match message:
        case AssistantMessage():
            return ChatMessage(
                role="assistant",
                content=text_of(message.content) or message.refusal or "",
                name=message.name,
                reasoning=message.reasoning_content,
                calls=_calls(message, place),
            )
        case ToolMessage():
            text = text_of(message.content)
            return ChatMessage(role="tool", content=text, name=message.name, call_id=message.tool_call_id)
        case FunctionMessage():
            return ChatMessage(role="tool", content=text_of(message.content), name=message.name, call_id=_LEGACY_ID)
        case UserMessage():
            return ChatMessage(role="user", content=text_of(message.content), name=message.name)
        case _:
            return ChatMessage(role="system", content=text_of(message.content), name=message.name)


def _calls(message: AssistantMessage, place: int) -> tuple[PastCall, ...]:
    calls = [
        (call.id, call.function, f"tool_calls[{number}].function")
        for number, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call is not None:
        calls.append((_LEGACY_ID, message.function_call, "function_call"))
    return tuple(
        PastCall(id, function.name, read_arguments(function.arguments, f"messages[{place}].{path}.arguments"))
        for id, function, path in calls
    )


def read_arguments(text: str, field: str) -> dict[str, Any]:
    """Parse a call's arguments; an empty text has none. Raises ApiError if they are not a JSON object or too large."""
    try:
        arguments = read_value(text or "{}")
    except ValueError as error:
        raise ApiError(400, f"{field} must be a JSON object, written as text: {error}", field) from None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{field} must be a JSON object, written as text", field)
    return arguments


def read_schema(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    """The JSON schema that an answer must match; None if there is none."""
    match wanted:
        case JsonSchemaFormat():
            given = wanted.json_schema.schema_
        case JsonObjectFormat():
            given = wanted.schema_
        case _:
            return None
    return {"type": "object"} if given is None else given


def schema_field(wanted: ResponseFormat | None) -> str:
    """The path of the schema in the body."""
    if isinstance(wanted, JsonObjectFormat) and wanted.schema_ is not None:
        return "response_format.schema"
    return "response_format.json_schema.schema" if isinstance(wanted, JsonSchemaFormat) else "response_format"
