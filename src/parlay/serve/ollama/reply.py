"""Replies of Ollama's `/api/chat` and `/api/generate`, whole and as lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from parlay.llm.jobs import Job
from parlay.llm.outputs import RequestOutput, StreamEvent
from parlay.serve.chat.answers import AnswerShape, Arguments, Begin, Delta, Text, Thought
from parlay.serve.errors import ERROR, ApiError
from parlay.serve.ollama import LAST_FIELD
from parlay.serve.protocol.answering import Chunk, LineFrames
from parlay.serve.protocol.json_values import read_value
from parlay.serve.protocol.logprobs import Speller, chat_logprobs, entries
from parlay.serve.protocol.usage import summary
from parlay.types import TokenLogprobs

_NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaShape:
    """The values that all lines of one answer share. ``kind`` is the operation."""

    model: str
    kind: Literal["chat", "generate"]
    answers: AnswerShape
    speller: Speller
    logprobs: bool
    load_seconds: float
    began: float = field(default_factory=time.monotonic)

    def part(self, text: str = "", thinking: str = "", calls: Sequence[object] = ()) -> dict[str, Any]:
        """A line with one piece of the answer."""
        own = {"thinking": thinking} if thinking else {}
        if self.kind == "generate":
            return {**stamp(self.model), "response": text, **own, LAST_FIELD: False}
        called = {"tool_calls": list(calls)} if calls else {}
        return {
            **stamp(self.model),
            "message": {"role": "assistant", "content": text, **own, **called},
            LAST_FIELD: False,
        }

    def spelled(self, entries: Sequence[TokenLogprobs]) -> dict[str, object]:
        return {"logprobs": chat_logprobs(entries, self.speller)["content"]} if self.logprobs and entries else {}

    def end(self, output: RequestOutput) -> dict[str, object]:
        """The fields of the last line; durations are in nanoseconds."""
        sample = output.outputs[0]
        metrics = sample.metrics
        seconds = {
            "total_duration": time.monotonic() - self.began + self.load_seconds,
            "load_duration": self.load_seconds,
            "prompt_eval_duration": metrics.prefill_seconds,
            "eval_duration": metrics.seconds - metrics.prefill_seconds,
        }
        return {
            LAST_FIELD: True,
            "done_reason": "stop" if sample.finish_reason == "stop" else "length",
            **{name: int(value * _NANOSECONDS) for name, value in seconds.items()},
            "prompt_eval_count": len(output.prompt_token_ids),
            "eval_count": len(sample.token_ids),
            "parlay": summary([sample]),
        }


def stamp(model: str) -> dict[str, Any]:
    """The model's name and the time, which begin every line."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def only_loaded(model: str, kind: Literal["chat", "generate"], reason: Literal["load", "unload"]) -> dict[str, object]:
    """The reply to a request that only loads or unloads the model."""
    empty: dict[str, Any] = (
        {"response": ""} if kind == "generate" else {"message": {"role": "assistant", "content": ""}}
    )
    return {**stamp(model), **empty, LAST_FIELD: True, "done_reason": reason}


def ollama_reply(output: RequestOutput, shape: OllamaShape) -> dict[str, object]:
    sample = output.outputs[0]
    pieces = _Pieces()
    pieces.take(shape.answers.read(sample.text), over=True)
    whole = shape.part(pieces.text, pieces.thinking, pieces.calls)
    return {**whole, **shape.spelled(entries(sample)), **shape.end(output)}


class _Pieces:
    """Collects what was added since the last line; a call is included when it is complete."""

    def __init__(self) -> None:
        self.text = self.thinking = ""
        self.calls: list[dict[str, object]] = []
        self._name: str | None = None
        self._arguments = ""

    def take(self, deltas: Sequence[Delta], *, over: bool) -> None:
        for delta in deltas:
            match delta:
                case Text(text):
                    self.text += text
                case Thought(text):
                    self.thinking += text
                case Begin(_, name):
                    self._end_call()
                    self._name = name
                case Arguments(_, text):
                    self._arguments += text
        if over:
            self._end_call()

    def _end_call(self) -> None:
        """End a call; one that is cut off or not valid JSON is dropped."""
        if self._name is not None:
            with suppress(ValueError):
                self.calls.append({"function": {"name": self._name, "arguments": read_value(self._arguments)}})
        self._name, self._arguments = None, ""

    def clear(self) -> None:
        self.text = self.thinking = ""
        self.calls = []

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls)


class OllamaChunks:
    """Turns what each step adds into the lines of a stream."""

    frames = LineFrames()

    def __init__(self, job: Job, shape: OllamaShape) -> None:
        self._shape = shape
        self._sample = job.samples[0]
        self._reader = shape.answers.reader()
        self._pieces = _Pieces()
        self._pieces.take(self._reader.feed(self._sample.released), over=False)
        self._pieces.clear()  # sent by the server that began the stream
        self._tokens = 0

    def opening(self) -> Sequence[Chunk]:
        return []

    def add(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        del place  # there is only one job
        over = event.finish_reason is not None
        deltas = self._reader.feed(event.text)
        self._pieces.take([*deltas, *self._reader.finish()] if over else deltas, over=over)
        spelled = self._shape.spelled(self._entries(event))
        chunks: list[Chunk] = []
        if self._pieces or spelled:
            part = self._shape.part(self._pieces.text, self._pieces.thinking, self._pieces.calls)
            chunks.append({**part, **spelled})
            self._pieces.clear()
        if event.output is not None:
            chunks.append({**self._shape.part(), **self._shape.end(event.output)})
        return chunks

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        return [{ERROR: error.message}]

    def _entries(self, event: StreamEvent) -> Sequence[TokenLogprobs]:
        first, self._tokens = self._tokens, self._tokens + len(event.token_ids)
        return self._sample.logprobs[first : self._tokens]
