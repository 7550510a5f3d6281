"""Replies of `/v1/responses`, whole and as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict

from parlay.llm.jobs import Job
from parlay.llm.outputs import RequestOutput, StreamEvent
from parlay.serve.chat.answers import AnswerShape, thought_length
from parlay.serve.errors import ERROR, ApiError
from parlay.serve.openai.responses import LAST_EVENTS
from parlay.serve.openai.responses.body import ResponsesBody
from parlay.serve.openai.responses.items import Event, ItemWriter
from parlay.serve.protocol.answering import Chunk, NamedFrames
from parlay.serve.protocol.logprobs import Speller, chat_logprobs, entries, tokens_before
from parlay.serve.protocol.steps_ahead import ahead_reply
from parlay.serve.protocol.usage import RequestMetrics, Summary, extras, usage
from parlay.types import SamplingParams, TokenLogprobs


class ResponseReply(TypedDict):
    """The fields that clients read first; the others repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    metrics: RequestMetrics
    parlay: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """The values that all states of a response share. ``keep`` is called with the complete response."""

    model: str
    body: ResponsesBody
    params: SamplingParams
    answers: AnswerShape
    speller: Speller
    keep: Callable[[Mapping[str, Any]], None]
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(24)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def logprobs_of(self, entries: Sequence[TokenLogprobs]) -> Sequence[Mapping[str, Any]]:
        return chat_logprobs(entries, self.speller)["content"] if self.body.logprobs is not None else ()

    def state(self, status: str, output: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """The response so far, without the fields that are known only at the end."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": list(output),
            "usage": None,
            **_echo(self.body, self.params),
        }


def _echo(body: ResponsesBody, params: SamplingParams) -> dict[str, Any]:
    """The request's settings, which every response repeats."""
    plain = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice", "text", "reasoning"})
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **plain.get("reasoning", {})},
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **plain.get("text", {})},
        "tool_choice": plain.get("tool_choice", "auto"),
        "tools": plain.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
    }


def whole_response(output: RequestOutput, shape: ResponseShape) -> dict[str, Any]:
    (sample,) = output.outputs
    writer = ItemWriter(shape.id)
    length = thought_length(sample.text, shape.answers.thoughts, shape.answers.tags)
    skipped = tokens_before(sample, length)
    logprobs = shape.logprobs_of(entries(sample)[skipped:])
    list(writer.take(shape.answers.read(sample.text), logprobs))
    return _ended(output, shape, writer)[-1]


def _ended(output: RequestOutput, shape: ResponseShape, writer: ItemWriter) -> tuple[list[Event], dict[str, Any]]:
    """The events that end the last item, and the whole response, which is also stored."""
    (sample,) = output.outputs
    status = "completed" if sample.finish_reason == "stop" else "incomplete"
    events = list(writer.finish(status))
    facts = extras([output], explain=bool(shape.body.explain))
    response = {**shape.state(status, writer.items), "usage": _usage(output, shape), **facts}
    if (ahead := ahead_reply(output)) is not None:
        response["reason_ahead"] = ahead
    shape.keep(response)
    return events, response


def _usage(output: RequestOutput, shape: ResponseShape) -> dict[str, Any]:
    (sample,) = output.outputs
    length = thought_length(sample.text, shape.answers.thoughts, shape.answers.tags)
    reasoned = tokens_before(sample, length)
    counts = usage([output])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": counts["total_tokens"],
    }


class ResponseChunks:
    """The numbered events of a stream: the beginning of the response, its items, and the whole response at the end."""

    def __init__(self, job: Job, shape: ResponseShape) -> None:
        self.frames = NamedFrames()
        self._shape = shape
        self._sample = job.samples[0]
        self._reader = shape.answers.reader()
        self._writer = ItemWriter(shape.id)
        self._tokens = 0
        resume = shape.body.resume
        self._number = 0 if resume is None else resume.events or 0
        list(self._writer.take(self._reader.feed(self._sample.released)))  # sent by the server that began the stream

    def opening(self) -> Sequence[Chunk]:
        state = self._shape.state("in_progress")
        begun = [{"type": f"response.{word}", "response": state} for word in ("created", "in_progress")]
        return self._numbered(begun)

    def add(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        del place  # there is only one job
        events = list(self._writer.take(self._reader.feed(event.text), self._logprobs(event)))
        if event.output is not None:
            events += self._writer.take(self._reader.finish())
            ends, response = _ended(event.output, self._shape, self._writer)
            events += [*ends, {"type": LAST_EVENTS[response["status"]], "response": response}]
        return self._numbered(events)

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        failure = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        failed = {**self._shape.state("failed", self._writer.items), "error": failure}
        last = {"type": ERROR, "code": error.code, "message": error.message, "param": error.param, **error.body}
        return self._numbered([{"type": LAST_EVENTS["failed"], "response": failed}, last])

    def _logprobs(self, event: StreamEvent) -> Sequence[Mapping[str, Any]]:
        if self._shape.body.logprobs is None:
            return ()
        first, self._tokens = self._tokens, self._tokens + len(event.token_ids)
        return self._shape.logprobs_of(self._sample.logprobs[first : self._tokens])

    def _numbered(self, events: Sequence[Event]) -> Sequence[Chunk]:
        numbered = [{**event, "sequence_number": self._number + place} for place, event in enumerate(events)]
        self._number += len(events)
        return numbered
