"""Messages and functions as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from parlay.serve.chat.formats import CallFormat, format_of
from parlay.serve.chat.request import ChatMessage, ChatRequest, Function
from parlay.text.chat_template import Tools


def conversation(chat: ChatRequest, template: str) -> tuple[list[dict[str, Any]], Tools]:
    """Messages and tools for the template."""
    shape = format_of(template)
    own_calls = "tool_calls" in template
    messages = [_message(message, shape, own_calls=own_calls) for message in chat.messages]
    return messages, [{"type": "function", "function": _described(function)} for function in chat.functions]


def _message(message: ChatMessage, shape: CallFormat, *, own_calls: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.call_id is not None:
        plain["tool_call_id"] = message.call_id
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
    if own_calls and calls:
        ids = [call.id for call in message.calls]
        plain["tool_calls"] = [
            {"id": id, "type": "function", "function": call} for id, call in zip(ids, calls, strict=True)
        ]
    elif calls:
        plain["content"] += "\n".join(_written(call, shape) for call in calls)
    return plain


def _written(call: Mapping[str, Any], shape: CallFormat) -> str:
    text = json.dumps({"name": call["name"], shape.arguments: call["arguments"]}, ensure_ascii=False)
    if shape.style == "list":
        return f"{shape.begin}[{text}]"
    if shape.style == "named":
        return f"{shape.begin}{call['name']}[ARGS]{json.dumps(call['arguments'], ensure_ascii=False)}"
    return f"{shape.begin}\n{text}\n{shape.end}" if shape.begin else text


def _described(function: Function) -> dict[str, Any]:
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {key: value for key, value in fields.items() if value is not None}
