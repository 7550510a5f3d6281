"""Translates the body of `/v1/messages` to a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fastapi import Request

from parlay.llm.request_options import RequestOptions
from parlay.serve.anthropic.body import (
    CountBody,
    Document,
    MessagesBody,
    SystemParam,
    Texts,
    Thinking,
    ToolResult,
    ToolUse,
    TurnParam,
)
from parlay.serve.chat.request import ChatMessage, ChatRequest, Function, PastCall, one_system
from parlay.serve.errors import NO_THREADS, ApiError
from parlay.serve.protocol.body import TextPart, check_extras
from parlay.serve.protocol.resuming import going_on
from parlay.serve.protocol.sampling_from_body import FieldNames, limited, refused, request_options
from parlay.serve.settings import Settings
from parlay.types import SamplingParams

NAMES = FieldNames(
    "messages",
    {
        **{name: name for name in MessagesBody.model_fields},
        "stop": "stop_sequences",
        "reasoning_effort": "thinking",
    },
)
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Effort levels that chat templates do not know, each with the nearest that they do."""


def messages_request(body: MessagesBody, request: Request, settings: Settings, usual: SamplingParams) -> ChatRequest:
    """Translate the body; ``usual`` has the sampling parameters that it leaves out. Raises ApiError for an invalid
    body."""
    _refuse_threads(body)
    check_extras(body, request, settings)
    body.check()
    options = request_options(request, body)
    return _chat(body, _params(body, settings, usual), going_on(options, body.resume, stream=bool(body.stream)))


def count_request(body: CountBody, request: Request, settings: Settings) -> ChatRequest:
    """Translate the body of a request that only counts the prompt's tokens."""
    check_extras(body, request, settings)
    body.check()
    return _chat(body, SamplingParams(max_tokens=1), request_options(request))


def _refuse_threads(body: MessagesBody) -> None:
    """Raises ApiError for a message of a thread: it has only the new messages, and the server does not keep the
    others."""
    if (body.model_extra or {}).get("thread") is not None:
        message = "thread is not supported by this server: remove it and send the whole conversation"
        raise ApiError(400, message, "thread", NO_THREADS)


def _params(body: MessagesBody, settings: Settings, usual: SamplingParams) -> SamplingParams:
    values = body.model_dump(include={"temperature", "top_p", "top_k", "seed"}, exclude_none=True)
    try:
        params = replace(usual, **values, stop=body.stop_sequences or None, max_tokens=body.max_tokens)
    except ValueError as error:
        raise refused(error, NAMES) from None
    return limited(params, settings, NAMES)


def _chat(body: CountBody, params: SamplingParams, options: RequestOptions) -> ChatRequest:
    choice = body.tool_choice
    tools = body.callable_tools.items()
    continues = body.messages[-1].role == "assistant"
    return ChatRequest(
        messages=one_system(tuple(_messages(body))),
        params=params,
        options=options,
        functions=tuple(Function(t.name, t.description, t.input_schema, field) for field, t in tools),
        must_call=choice is not None and choice.type in ("any", "tool"),
        single_call=choice is not None and bool(choice.disable_parallel_tool_use),
        answer_schema=body.answer_schema,
        schema_field="output_format.schema" if body.output_config is None else "output_config.format.schema",
        effort=_effort(body),
        begin_answer=not continues,
        continue_final=continues,
    )


def _effort(body: CountBody) -> str | None:
    """The effort level; None leaves it to the model."""
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is None:
        return "medium" if body.thinking is not None else None
    return _EFFORTS.get(effort, effort)


def _messages(body: CountBody) -> Iterator[ChatMessage]:
    if body.system:
        yield ChatMessage(role="system", content=_joined(body.system, "\n\n"))
    for turn in body.messages:
        if isinstance(turn, SystemParam):
            yield ChatMessage(role="system", content=_joined(turn.content, "\n\n"))
        else:
            yield from _side(turn)


def _side(turn: TurnParam) -> Iterator[ChatMessage]:
    """Tool results come before the text of the same message."""
    blocks = turn.blocks
    results = [block for block in blocks if isinstance(block, ToolResult)]
    for result in results:
        content = _joined(result.content or "", "")
        yield ChatMessage(
            role="tool", content=f"Error: {content}" if result.is_error else content, call_id=result.tool_use_id
        )
    text = "".join(block.text for block in blocks if isinstance(block, TextPart | Document))
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, Thinking))
    calls = tuple(PastCall(block.id, block.name, block.input) for block in blocks if isinstance(block, ToolUse))
    if text or thoughts or calls or not results or turn.role == "assistant":
        yield ChatMessage(role=turn.role, content=text, reasoning=thoughts or None, calls=calls)


def _joined(content: Texts, between: str) -> str:
    return content if isinstance(content, str) else between.join(block.text for block in content)
