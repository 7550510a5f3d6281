"""Replies of `/v1/messages`, whole and as a stream of events."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import TypedDict

from parlay.llm.jobs import Job
from parlay.llm.outputs import CompletionOutput, RequestOutput, StreamEvent
from parlay.serve.anthropic import LAST_EVENT
from parlay.serve.chat.answers import AnswerShape, Arguments, Begin, Delta, Text, Thought
from parlay.serve.errors import ApiError
from parlay.serve.protocol.answering import Chunk, NamedFrames
from parlay.serve.protocol.json_values import read_value
from parlay.serve.protocol.usage import Summary, summary

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(TypedDict):
    """``input_tokens`` are the prompt's tokens that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, object]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    parlay: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageShape:
    """The fields that all events of one answer share."""

    model: str
    answers: AnswerShape
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


def message_reply(output: RequestOutput, shape: MessageShape) -> MessageReply:
    sample = output.outputs[0]
    blocks = _Blocks()
    for delta in shape.answers.read(sample.text):
        blocks.feed(delta)
    blocks.close()
    reason, sequence = _stop(sample, called=blocks.called)
    return {
        "id": shape.id,
        "type": "message",
        "role": "assistant",
        "model": shape.model,
        "content": blocks.whole,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(output),
        "parlay": summary([sample]),
    }


def _stop(sample: CompletionOutput, *, called: bool) -> tuple[StopReason, str | None]:
    if sample.finish_reason != "stop":
        return "max_tokens", None
    if isinstance(sample.stop_reason, str):
        return "stop_sequence", sample.stop_reason
    return ("tool_use" if called else "end_turn"), None


def _usage(output: RequestOutput) -> MessagesUsage:
    cached = output.outputs[0].metrics.cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sum(len(sample.token_ids) for sample in output.outputs),
    }


class _Blocks:
    """The content blocks of an answer: as events while it is decoded, and ``whole`` at the end."""

    def __init__(self) -> None:
        self.whole: list[dict[str, object]] = []
        self.called = False
        self._open = ""
        self._written = ""

    def feed(self, delta: Delta) -> list[Chunk]:
        match delta:
            case Text(text):
                return self._more("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": text}, text)
            case Thought(text):
                empty: dict[str, object] = {"type": "thinking", "thinking": "", "signature": ""}
                return self._more("thinking", empty, {"type": "thinking_delta", "thinking": text}, text)
            case Begin(_, name):
                self.called = True
                call: dict[str, object] = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name}
                return [*self.close(), *self._begin("tool_use", {**call, "input": {}})]
            case Arguments(_, text):
                self._written += text
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def close(self) -> list[Chunk]:
        """End the open block."""
        if not self._open:
            return []
        if self._open == "tool_use":
            self.whole[-1]["input"] = _arguments(self._written)
        else:
            self.whole[-1][self._open] = self._written
        self._open = ""
        return [{"type": "content_block_stop", "index": len(self.whole) - 1}]

    def _more(self, kind: str, empty: dict[str, object], delta: dict[str, object], text: str) -> list[Chunk]:
        opening = [*self.close(), *self._begin(kind, empty)] if self._open != kind else []
        self._written += text
        return [*opening, self._delta(delta)]

    def _begin(self, kind: str, block: dict[str, object]) -> list[Chunk]:
        self._open, self._written = kind, ""
        self.whole.append(block)
        return [{"type": "content_block_start", "index": len(self.whole) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, object]) -> Chunk:
        return {"type": "content_block_delta", "index": len(self.whole) - 1, "delta": delta}


def _arguments(text: str) -> object:
    """A call's arguments as an object; empty if they are cut off or not valid JSON."""
    try:
        return read_value(text)
    except ValueError:
        return {}


class MessageChunks:
    """Turns what each step adds into the events of a stream."""

    frames = NamedFrames()

    def __init__(self, job: Job, shape: MessageShape) -> None:
        self._shape = shape
        self._prompt = len(job.samples[0].request.prompt)
        self._reader = shape.answers.reader()
        self._blocks = _Blocks()
        for delta in self._reader.feed(job.samples[0].released):  # sent by the server that began the stream
            self._blocks.feed(delta)

    def opening(self) -> Sequence[Chunk]:
        usage: MessagesUsage = {
            "input_tokens": self._prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message: dict[str, object] = {
            "id": self._shape.id,
            "type": "message",
            "role": "assistant",
            "model": self._shape.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def add(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        del place  # there is only one job
        deltas = self._reader.feed(event.text)
        if event.finish_reason is not None:
            deltas += self._reader.finish()
        chunks = [chunk for delta in deltas for chunk in self._blocks.feed(delta)]
        if event.output is not None:
            chunks += [*self._blocks.close(), *self._end(event.output)]
        return chunks

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        return [error.as_message()]

    def _end(self, output: RequestOutput) -> list[Chunk]:
        sample = output.outputs[0]
        reason, sequence = _stop(sample, called=self._blocks.called)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        extra = {"usage": _usage(output), "parlay": summary([sample])}
        return [{"type": "message_delta", "delta": delta, **extra}, {"type": LAST_EVENT}]
