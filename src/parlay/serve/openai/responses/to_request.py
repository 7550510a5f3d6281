"""Translates the body of `/v1/responses` to a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request

from parlay.serve.chat.request import ChatMessage, ChatRequest, Function, PastCall, one_system
from parlay.serve.openai.chat.contents import read_arguments
from parlay.serve.openai.responses.body import (
    CallItem,
    CallOutputItem,
    InputItem,
    InputMessage,
    PlainFormat,
    ReasoningItem,
    ResponsesBody,
    TextFormatJsonSchema,
    text_of,
)
from parlay.serve.protocol.body import check_extras
from parlay.serve.protocol.resuming import going_on
from parlay.serve.protocol.sampling_from_body import FieldNames, body_options, sampling_params
from parlay.serve.settings import Settings
from parlay.types import SamplingParams

NAMES = FieldNames.of(
    ResponsesBody,
    "input",
    max_tokens="max_output_tokens",
    reasoning_effort="reasoning.effort",
    verbosity="text.verbosity",
)


def responses_request(
    body: ResponsesBody, earlier: Sequence[ChatMessage], request: Request, settings: Settings, usual: SamplingParams
) -> ChatRequest:
    """Translate the body; ``earlier`` is the conversation that it continues, and ``usual`` has the sampling parameters
    that it leaves out.

    Raises ApiError for an invalid body.
    """
    check_extras(body, request, settings)
    body.check()
    params = sampling_params(body, settings, NAMES, usual, max_tokens=body.max_output_tokens, logprobs=body.logprobs)
    tools = body.callable_tools.items()
    instructions = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    return ChatRequest(
        messages=one_system(joined([*instructions, *earlier, *read_input(body)])),
        params=params,
        options=going_on(body_options(body, request), body.resume, stream=bool(body.stream)),
        functions=tuple(Function(t.name, t.description, t.parameters, field) for field, t in tools),
        must_call=body.must_call,
        single_call=body.parallel_tool_calls is False,
        answer_schema=_schema(body),
        schema_field="text.format.schema",
        variables=body.chat_template_kwargs or {},
        effort=body.reasoning.effort if body.reasoning is not None else None,
        verbosity=body.text.verbosity if body.text is not None else None,
    )


def read_input(body: ResponsesBody) -> list[ChatMessage]:
    """Translate the input items. Raises ApiError for an earlier call whose arguments are not a JSON object."""
    if isinstance(body.input, str):
        return [ChatMessage(role="user", content=body.input)]
    return [_message(item, place) for place, item in enumerate(body.input)]


def _message(item: InputItem, place: int) -> ChatMessage:
    match item:
        case InputMessage():
            role = "system" if item.role == "developer" else item.role
            return ChatMessage(role=role, content=text_of(item.content))
        case CallItem():
            arguments = read_arguments(item.arguments, f"input[{place}].arguments")
            return ChatMessage(role="assistant", content="", calls=(PastCall(item.call_id, item.name, arguments),))
        case CallOutputItem():
            return ChatMessage(role="tool", content=text_of(item.output), call_id=item.call_id)
        case ReasoningItem():
            text = "".join(part.text for part in item.content or item.summary or ())
            return ChatMessage(role="assistant", content="", reasoning=text or None)


def joined(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Join the items of one answer (reasoning, text, calls) into one message."""
    result: list[ChatMessage] = []
    for message in messages:
        last = result[-1] if result else None
        if last is not None and last.role == message.role == "assistant":
            result[-1] = replace(
                last,
                content=last.content + message.content,
                reasoning="".join(filter(None, (last.reasoning, message.reasoning))) or None,
                calls=last.calls + message.calls,
            )
        else:
            result.append(message)
    return result


def _schema(body: ResponsesBody) -> Mapping[str, Any] | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or isinstance(wanted, PlainFormat):
        return None
    return wanted.schema_ if isinstance(wanted, TextFormatJsonSchema) else {"type": "object"}
