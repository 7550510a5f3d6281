"""Replies of `/v1/chat/completions`, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from parlay.llm.jobs import Job
from parlay.llm.outputs import CompletionOutput, RequestOutput, StreamEvent
from parlay.serve.chat.answers import AnswerShape, Arguments, Begin, Delta, Text, Thought
from parlay.serve.chat.reasoning import thought_length
from parlay.serve.errors import ApiError
from parlay.serve.protocol.logprobs import ChatLogprobs, chat_logprobs, entries
from parlay.serve.protocol.streaming import Chunk, DataFrames
from parlay.serve.protocol.token_bytes import Speller, tokens_before
from parlay.serve.protocol.usage import (
    RequestMetrics,
    RunningUsage,
    StreamUsage,
    Summary,
    Usage,
    extras,
    last_chunks,
    usage,
)
from parlay.types import FinishReason, TokenLogprobs

Finish = Literal["stop", "length", "tool_calls", "function_call"]


class CalledFunction(TypedDict):
    name: str
    arguments: str


class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call]]
    function_call: NotRequired[CalledFunction]


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatReply(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None
    metrics: RequestMetrics
    parlay: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """What the replies to one request have in common."""

    model: str
    speller: Speller
    logprobs: bool
    answers: AnswerShape = field(default_factory=AnswerShape)
    skip_special: bool = True
    legacy: bool = False
    """Whether calls are written in the shape that preceded tools: one call at most."""
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def logprobs_of(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return chat_logprobs(entries, self.speller) if self.logprobs else None


def chat_reply(output: RequestOutput, shape: ChatShape) -> ChatReply:
    return {
        "id": shape.id,
        "object": "chat.completion",
        "created": shape.created,
        "model": shape.model,
        "choices": [_choice(sample, shape) for sample in output.outputs],
        "usage": usage([output], sum(reasoning_tokens(sample, shape) for sample in output.outputs)),
        "system_fingerprint": None,
        **extras([output]),
    }


def _choice(sample: CompletionOutput, shape: ChatShape) -> ChatChoice:
    deltas = shape.answers.read(sample.text)
    text = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    calls = [delta for delta in deltas if isinstance(delta, Begin)]
    message: AnswerMessage = {"role": "assistant", "content": text, "refusal": None}
    thought = "".join(delta.text for delta in deltas if isinstance(delta, Thought))
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["content"] = text or None
    if calls and shape.legacy:
        message["function_call"] = _call(calls[0], deltas)["function"]
    elif calls:
        message["tool_calls"] = [_call(begin, deltas) for begin in calls]
    return {
        "index": sample.index,
        "message": message,
        "logprobs": shape.logprobs_of(entries(sample)),
        "finish_reason": finish_word(sample.finish_reason, called=_called_word(shape) if calls else None),
    }


def reasoning_tokens(sample: CompletionOutput, shape: ChatShape) -> int:
    length = thought_length(sample.text, shape.answers.thoughts)
    return tokens_before(shape.speller.tokenizer, sample.token_ids, length, skip_special=shape.skip_special)


def _called_word(shape: ChatShape) -> Literal["tool_calls", "function_call"]:
    return "function_call" if shape.legacy else "tool_calls"


def _call(begin: Begin, deltas: Sequence[Delta]) -> Call:
    written = (delta.text for delta in deltas if isinstance(delta, Arguments) and delta.call == begin.call)
    return {"id": _call_id(), "type": "function", "function": {"name": begin.name, "arguments": "".join(written)}}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def finish_word(reason: FinishReason, *, called: Literal["tool_calls", "function_call"] | None = None) -> Finish:
    """``called`` is the word for an answer with calls. An answer that was cut short keeps its word, calls or not."""
    if reason == "stop":
        return called or "stop"
    return "length"


# ------------------------------------------------------------------------------------------------------------- chunks


class ChatChunks:
    """Makes the chunks of a stream from what each step adds: the role of each choice first, then the deltas."""

    def __init__(self, job: Job, shape: ChatShape, usage: StreamUsage) -> None:
        self._shape = shape
        self._samples = job.samples
        self._readers = [shape.answers.reader() for _ in job.samples]
        self._tokens = [0] * len(job.samples)
        self._wants_usage = usage.last
        self._running = RunningUsage([job]) if usage.running else None
        self.frames = DataFrames(self._shared)

    @property
    def _shared(self) -> Chunk:
        return {
            "id": self._shape.id,
            "object": "chat.completion.chunk",
            "created": self._shape.created,
            "model": self._shape.model,
            "system_fingerprint": None,
        }

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        return [error.body]

    def opening(self) -> Sequence[Chunk]:
        role = {"role": "assistant", "content": ""}
        more = self._running.now() if self._running is not None else {}
        return [{"choices": [_delta_choice(index, role)], **more} for index in range(len(self._samples))]

    def tell(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        del place  # there is one job
        more = self._running.after(event) if self._running is not None else {}
        choice = self._choice(event)
        if event.output is not None:
            reasoned = sum(reasoning_tokens(sample, self._shape) for sample in event.output.outputs)
            return last_chunks(
                choice, [event.output], wants_usage=self._wants_usage, more=more, reasoning_tokens=reasoned
            )
        return [{"choices": [choice], **more}] if choice is not None else []

    def _choice(self, event: StreamEvent) -> dict[str, object] | None:
        """None for a step that has nothing to tell yet."""
        entries = self._entries(event)
        delta = self._delta(event)
        if event.finish_reason is None and not delta and not entries:
            return None
        called = _called_word(self._shape) if self._readers[event.index].called else None
        choice = _delta_choice(event.index, delta)
        choice["logprobs"] = self._shape.logprobs_of(entries) if entries else None
        choice["finish_reason"] = finish_word(event.finish_reason, called=called) if event.finish_reason else None
        choice["parlay"] = {"pieces": [[piece.text, piece.source] for piece in event.pieces]}
        return choice

    def _entries(self, event: StreamEvent) -> list[TokenLogprobs]:
        """The log-probabilities of the event's tokens, if they are wanted."""
        if not self._shape.logprobs:
            return []
        first = self._tokens[event.index]
        self._tokens[event.index] = last = first + len(event.token_ids)
        return self._samples[event.index].logprobs[first:last]

    def _delta(self, event: StreamEvent) -> dict[str, object]:
        reader = self._readers[event.index]
        deltas = reader.feed(event.text)
        if event.finish_reason is not None:
            deltas += reader.finish()
        text = "".join(delta.text for delta in deltas if isinstance(delta, Text))
        thought = "".join(delta.text for delta in deltas if isinstance(delta, Thought))
        told: dict[str, object] = {"reasoning_content": thought} if thought else {}
        if text:
            told["content"] = text
        calls = _call_deltas(deltas)
        if calls and self._shape.legacy:
            told["function_call"] = calls[0]["function"]
        elif calls:
            told["tool_calls"] = calls
        return told


def _delta_choice(index: int, delta: Mapping[str, object]) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call_deltas(deltas: Sequence[Delta]) -> list[dict[str, object]]:
    """At most one entry per call: it begins with id and name, later ones have more arguments."""
    entries: dict[int, dict[str, object]] = {}
    written: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta, Begin):
            entries[delta.call] = {"index": delta.call, "id": _call_id(), "type": "function", "name": delta.name}
        elif isinstance(delta, Arguments):
            entries.setdefault(delta.call, {"index": delta.call})
            written[delta.call] = written.get(delta.call, "") + delta.text
    for call, entry in entries.items():
        named = {"name": entry.pop("name")} if "name" in entry else {}
        entry["function"] = named | {"arguments": written.get(call, "")}
    return list(entries.values())
