"""Translates the bodies of Ollama's `/api/chat` and `/api/generate` to a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request

from parlay.llm.request_options import RequestOptions
from parlay.serve.chat.request import ChatMessage, ChatRequest, Function, PastCall
from parlay.serve.errors import ApiError
from parlay.serve.ollama.body import GenerateBody, OllamaBody, OllamaChatBody, OllamaMessage, OllamaOptions
from parlay.serve.protocol.resuming import going_on
from parlay.serve.protocol.sampling_from_body import FieldNames, limited, refused, request_options
from parlay.serve.settings import Settings
from parlay.types import SamplingParams

_SPELLINGS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_OURS = {_SPELLINGS.get(name, name): f"options.{name}" for name in OllamaOptions.model_fields}
_OTHERS = {
    **_OURS,
    "logprobs": "logprobs",
    "strategy": "strategy",
    "exactness": "exactness",
    "reasoning_effort": "think",
    "chat_template_kwargs": "think",
    "structured_outputs": "format",
}
CHAT_NAMES = FieldNames("messages", _OTHERS)
GENERATE_NAMES = FieldNames("prompt", _OTHERS)


def ollama_chat_request(
    body: OllamaChatBody, request: Request, settings: Settings, usual: SamplingParams
) -> ChatRequest:
    """Translate the body; ``usual`` has the sampling parameters that it leaves out. Raises ApiError for an invalid
    body."""
    messages = tuple(_message(message) for message in body.messages or ())
    tools = [(f"tools[{place}].function.parameters", tool.function) for place, tool in enumerate(body.tools or ())]
    functions = tuple(Function(one.name, one.description, one.parameters, field) for field, one in tools)
    params = ollama_params(body, settings, CHAT_NAMES, usual)
    return replace(_request(body, messages, params, request), functions=functions)


def generate_request(body: GenerateBody, request: Request, settings: Settings, usual: SamplingParams) -> ChatRequest:
    """Translate the body; its prompt becomes the user's message. Raises ApiError for an invalid body."""
    system = (ChatMessage(role="system", content=body.system),) if body.system else ()
    user = ChatMessage(role="user", content=body.prompt or "")
    params = ollama_params(body, settings, GENERATE_NAMES, usual)
    return _request(body, (*system, user), params, request)


def ollama_params(body: OllamaBody, settings: Settings, names: FieldNames, usual: SamplingParams) -> SamplingParams:
    """The sampling parameters; ``usual`` has those that the body leaves out.

    Raises ApiError for values that contradict each other or exceed the server's limits.
    """
    options = body.options or OllamaOptions()
    if options.repeat_last_n not in (None, -1, 0) and options.repeat_penalty not in (None, 1):
        field = "options.repeat_last_n"
        raise ApiError(400, f"{field} must be -1 or 0: the penalty looks at the whole text", field)
    given: Mapping[str, Any] = options.model_dump(
        exclude_none=True, include=set(OllamaOptions.model_fields) - {"repeat_last_n"}
    )
    ours = {_SPELLINGS.get(name, name): value for name, value in given.items() if not _is_unset(name, value)}
    if options.repeat_last_n == 0:
        ours.pop("repetition_penalty", None)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    try:
        params = replace(usual, **{"max_tokens": None, **ours}, logprobs=logprobs)
    except ValueError as error:
        raise refused(error, names) from None
    return limited(params, settings, names)


def ollama_options(body: OllamaBody, request: Request) -> RequestOptions:
    """The request's options. Raises ApiError for invalid ones."""
    options = request_options(request, body)
    return going_on(options, body.resume, stream=body.streamed)


def _is_unset(name: str, value: object) -> bool:
    """Whether a value leaves the length or the seed to the server: a negative one does."""
    return name in ("num_predict", "seed") and isinstance(value, int) and value < 0


def _request(
    body: OllamaBody, messages: tuple[ChatMessage, ...], params: SamplingParams, request: Request
) -> ChatRequest:
    return ChatRequest(
        messages=messages,
        params=params,
        options=ollama_options(body, request),
        answer_schema=body.answer_schema,
        schema_field="format",
        effort=_effort(body.think),
    )


def _effort(think: bool | str | None) -> str | None:
    if isinstance(think, bool):
        return "medium" if think else "none"
    return think


def _message(message: OllamaMessage) -> ChatMessage:
    calls = enumerate(message.tool_calls or ())
    past = (PastCall(call.id or f"call_{at}", call.function.name, call.function.arguments) for at, call in calls)
    return ChatMessage(
        role=message.role,
        content=message.content or "",
        name=message.tool_name,
        reasoning=message.thinking or None,
        calls=tuple(past),
        call_id=message.tool_call_id,
    )
