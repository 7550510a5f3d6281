"""`/v1/chat/completions`: from its body to a chat request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from parlay.serve.bodies.chat import (
    AssistantMessage,
    ChatBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    ToolMessage,
)
from parlay.serve.bodies.common import text_of
from parlay.serve.chat.request import ChatMessage, ChatRequest, Function, PastCall
from parlay.serve.errors import ApiError
from parlay.serve.jobs import FieldNames, body_options, sampling_params
from parlay.serve.settings import Settings

NAMES = FieldNames.of(ChatBody, "messages")


def chat_request(body: ChatBody, request: Request, settings: Settings) -> ChatRequest:
    """Raises ApiError for a body that can't be used."""
    body.check()
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return ChatRequest(
        messages=read_messages(body),
        params=sampling_params(body, settings, NAMES, max_tokens=body.tokens, logprobs=logprobs),
        options=body_options(body, request),
        functions=read_functions(body),
        must_call=body.must_call,
        single_call=body.parallel_tool_calls is False,
        answer_schema=read_schema(body),
    )


def read_messages(body: ChatBody) -> tuple[ChatMessage, ...]:
    """Raises ApiError for an earlier call whose arguments are no JSON object."""
    return tuple(_message(message, place) for place, message in enumerate(body.messages))


def read_functions(body: ChatBody) -> tuple[Function, ...]:
    """Those that may be called."""
    tools = [tool.function for tool in body.callable_tools]
    return tuple(Function(tool.name, tool.description, tool.parameters) for tool in tools)


def _message(message: Message, place: int) -> ChatMessage:
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=text_of(message.content),
        name=message.name,
        calls=_calls(message, place) if isinstance(message, AssistantMessage) else (),
        call_id=message.tool_call_id if isinstance(message, ToolMessage) else None,
    )


def _calls(message: AssistantMessage, place: int) -> tuple[PastCall, ...]:
    calls = enumerate(message.tool_calls or ())
    return tuple(
        PastCall(
            call.id,
            call.function.name,
            read_arguments(call.function.arguments, f"messages.{place}.tool_calls.{number}.function.arguments"),
        )
        for number, call in calls
    )


def read_arguments(text: str, field: str) -> dict[str, Any]:
    """A call's arguments; an empty text has none. Raises ApiError for what is no JSON object."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{field} must be a JSON object, written as text", field)
    return arguments


def read_schema(body: ChatBody) -> Mapping[str, Any] | None:
    """The schema that an answer must keep to."""
    wanted = body.response_format
    if isinstance(wanted, JsonSchemaFormat) and wanted.json_schema.schema_ is not None:
        return wanted.json_schema.schema_
    return {"type": "object"} if isinstance(wanted, JsonObjectFormat | JsonSchemaFormat) else None
