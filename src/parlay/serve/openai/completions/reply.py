"""Replies of `/v1/completions`, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from typing_extensions import TypedDict

from parlay.llm.jobs import Job
from parlay.llm.outputs import CompletionOutput, RequestOutput, StreamEvent
from parlay.serve.errors import ApiError
from parlay.serve.openai.chat.reply import finish_word
from parlay.serve.protocol.logprobs import CompletionLogprobs, CompletionTable, entries
from parlay.serve.protocol.streaming import Chunk, DataFrames
from parlay.serve.protocol.token_bytes import Offsets, Speller
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
from parlay.types import Tokenizer


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionReply(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: None
    metrics: RequestMetrics
    parlay: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """What the replies to one request have in common. ``echoes`` are the prompts' texts, if asked for."""

    model: str
    tokenizer: Tokenizer | None
    n: int
    logprobs: bool
    skip_special: bool
    echoes: tuple[str, ...] | None = None
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def offsets(self, start: int = 0) -> Offsets:
        return Offsets(self.tokenizer, skip_special=self.skip_special, start=start)

    def echo(self, place: int) -> str:
        return self.echoes[place] if self.echoes is not None else ""

    def index(self, place: int, sample: int) -> int:
        """Choices are numbered prompt by prompt."""
        return place * self.n + sample


def completion_reply(outputs: Sequence[RequestOutput], shape: CompletionShape) -> CompletionReply:
    return {
        "id": shape.id,
        "object": "text_completion",
        "created": shape.created,
        "model": shape.model,
        "choices": [
            _choice(place, output, replace(sample, index=index), shape)
            for place, output in enumerate(outputs)
            for index, sample in enumerate(_best(output.outputs, shape.n))
        ],
        "usage": usage(outputs),
        "system_fingerprint": None,
        **extras(outputs),
    }


def _best(samples: Sequence[CompletionOutput], n: int) -> Sequence[CompletionOutput]:
    """The ``n`` samples with the highest mean log-probability."""
    if len(samples) == n:
        return samples
    return sorted(samples, key=lambda one: (one.cumulative_logprob or 0.0) / max(len(one.token_ids), 1), reverse=True)[
        :n
    ]


def _choice(place: int, output: RequestOutput, sample: CompletionOutput, shape: CompletionShape) -> CompletionChoice:
    reason = finish_word(sample.finish_reason)
    assert reason in ("stop", "length")
    return {
        "text": shape.echo(place) + sample.text,
        "index": shape.index(place, sample.index),
        "logprobs": _logprobs(place, output, sample, shape) if shape.logprobs else None,
        "finish_reason": reason,
    }


def _logprobs(
    place: int, output: RequestOutput, sample: CompletionOutput, shape: CompletionShape
) -> CompletionLogprobs:
    table = CompletionTable(Speller(shape.tokenizer), shape.offsets())
    if shape.echoes is not None:
        known = output.prompt_logprobs.entries if output.prompt_logprobs is not None else ()
        for token, entry in zip(output.prompt_token_ids, known, strict=True):
            table.add(token, entry)
        table.offsets = shape.offsets(len(shape.echo(place)))
    for token, logprob in zip(sample.token_ids, entries(sample), strict=True):
        table.add(token, logprob)
    return table.columns


# ------------------------------------------------------------------------------------------------------------- chunks


class CompletionChunks:
    """Makes the chunks of a stream from what each step adds: the echo first, if the request asks for it."""

    def __init__(self, jobs: Sequence[Job], shape: CompletionShape, usage: StreamUsage) -> None:
        self._jobs = jobs
        self._shape = shape
        self._wants_usage = usage.last
        self._running = RunningUsage(jobs) if usage.running else None
        self._speller = Speller(shape.tokenizer)
        self._tokens = [[0] * shape.n for _ in jobs]
        self._offsets = [[shape.offsets() for _ in range(shape.n)] for _ in jobs]
        self._outputs: dict[int, RequestOutput] = {}
        self.frames = DataFrames(self._shared)

    @property
    def _shared(self) -> Chunk:
        return {
            "id": self._shape.id,
            "object": "text_completion",
            "created": self._shape.created,
            "model": self._shape.model,
            "system_fingerprint": None,
        }

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        return [error.body]

    def opening(self) -> Sequence[Chunk]:
        more = self._running.now() if self._running is not None else {}
        return [
            {"choices": [_text_choice(self._shape.index(place, sample), echo)], **more}
            for place, echo in enumerate(self._shape.echoes or ())
            for sample in range(self._shape.n)
        ]

    def tell(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        more = self._running.after(event) if self._running is not None else {}
        choice = self._choice(place, event)
        if event.output is not None:
            self._outputs[place] = event.output
            if len(self._outputs) == len(self._jobs):
                outputs = [self._outputs[each] for each in range(len(self._jobs))]
                return last_chunks(choice, outputs, wants_usage=self._wants_usage, more=more)
        return [{"choices": [choice], **more}] if choice is not None else []

    def _choice(self, place: int, event: StreamEvent) -> dict[str, object] | None:
        """None for a step that has nothing to tell yet."""
        logprobs, text = self._logprobs(place, event), event.text
        if event.finish_reason is None and not text and logprobs is None:
            return None
        choice = _text_choice(self._shape.index(place, event.index), text)
        choice["logprobs"] = logprobs
        choice["finish_reason"] = finish_word(event.finish_reason) if event.finish_reason else None
        choice["parlay"] = {"pieces": [[piece.text, piece.source] for piece in event.pieces]}
        return choice

    def _logprobs(self, place: int, event: StreamEvent) -> CompletionLogprobs | None:
        if not self._shape.logprobs or not event.token_ids:
            return None
        first = self._tokens[place][event.index]
        self._tokens[place][event.index] = last = first + len(event.token_ids)
        table = CompletionTable(self._speller, self._offsets[place][event.index])
        sample = self._jobs[place].samples[event.index]
        for token, logprobs in zip(event.token_ids, sample.logprobs[first:last], strict=True):
            table.add(token, logprobs)
        return table.columns


def _text_choice(index: int, text: str) -> dict[str, object]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": None}
