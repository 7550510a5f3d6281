"""Streams of `/v1/chat/completions` and `/v1/completions`: what each step adds becomes a chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from parlay.llm.jobs import Job
from parlay.llm.outputs import Piece, RequestOutput, StreamEvent
from parlay.serve.chat.answers import Arguments, Begin, Delta, Text, Thought
from parlay.serve.errors import ApiError
from parlay.serve.openai.chat.reply import ChatShape, call_id, called_word, finish_word, reasoning_tokens
from parlay.serve.openai.completions.reply import CompletionShape
from parlay.serve.protocol.answering import Chunk, DataFrames
from parlay.serve.protocol.logprobs import CompletionTable, Speller, begins
from parlay.serve.protocol.steps_ahead import ahead_reply
from parlay.serve.protocol.usage import RunningUsage, StreamUsage, last_chunks
from parlay.serve.protocol.voting import vote_reply
from parlay.types import TARGET, FinishReason, TokenLogprobs

WHOLE_VOTE = "a vote sends its text when it is over"
"""Why a vote's stream can't be resumed."""


class ReplyShape(Protocol):
    """The values that all replies to one request share."""

    @property
    def id(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def explain(self) -> bool: ...


def chunk_frames(shape: ReplyShape, kind: str) -> DataFrames:
    """Frames for a stream of chunks with their common fields; ``kind`` is the chunks' ``object``."""
    return DataFrames(
        {
            "id": shape.id,
            "object": kind,
            "created": shape.created,
            "model": shape.model,
            "system_fingerprint": None,
        }
    )


class OpenAIChunks(ABC):
    """Turns what each step adds into the chunks of a stream; ``kind`` is the chunks' ``object``.

    ``ended`` are choices that the server which began the stream has ended.
    """

    def __init__(
        self,
        kind: str,
        jobs: Sequence[Job],
        shape: ReplyShape,
        usage: StreamUsage,
        ended: Collection[int] = (),
    ) -> None:
        self._jobs = jobs
        self._votes = jobs[0].vote is not None
        self._ended = ended
        self._wants_usage, self._explain = usage.last, shape.explain
        self._running = RunningUsage(jobs) if usage.running else None
        self._tokens = [[0] * len(job.samples) for job in jobs]
        self._outputs: dict[int, RequestOutput] = {}
        self.frames = chunk_frames(shape, kind)

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        return [error.body]

    def opening(self) -> Sequence[Chunk]:
        more = self._running.now() if self._running is not None else {}
        return [{"choices": [choice], **more} for choice in self._first_choices()]

    def add(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        more = self._running.after(event) if self._running is not None else {}
        choice = self._voted(place, event.output) if self._votes else self._choice(place, event)
        if self._index(place, event.index) in self._ended:
            choice = None
        if event.output is not None:
            self._outputs[place] = event.output
            if choice is not None and (ahead := ahead_reply(event.output)) is not None:
                choice = {**choice, "reason_ahead": ahead}
            if len(self._outputs) == len(self._jobs):
                outputs = [self._outputs[each] for each in range(len(self._jobs))]
                reasoned = self._reasoning_tokens(outputs)
                return last_chunks(
                    choice,
                    outputs,
                    wants_usage=self._wants_usage,
                    explain=self._explain,
                    more=more,
                    reasoning_tokens=reasoned,
                )
        return [{"choices": [choice], **more}] if choice is not None else []

    def _voted(self, place: int, output: RequestOutput | None) -> Mapping[str, object] | None:
        """The text of the chain that the vote chose; None until the vote is over."""
        if output is None or output.vote is None:
            return None
        one = output.chosen
        choice = self._choice(place, StreamEvent(one.index, one.pieces, one.token_ids, one.finish_reason, output))
        assert choice is not None, "it has ended"
        return {**choice, "index": self._index(place, 0), "vote": vote_reply(output.vote)}

    def _choice(self, place: int, event: StreamEvent) -> Mapping[str, object] | None:
        """The choice that an event adds to; None if it adds nothing yet."""
        text, logprobs = self._text(place, event), self._logprobs(place, event)
        if event.finish_reason is None and not any(text.values()) and logprobs is None:
            return None
        return {
            "index": self._index(place, event.index),
            **text,
            "logprobs": logprobs,
            "finish_reason": self._finish(event.index, event.finish_reason) if event.finish_reason else None,
            "parlay": _pieces(event.pieces),
        }

    def _entries(self, place: int, event: StreamEvent) -> list[TokenLogprobs]:
        """The log-probabilities of the event's tokens; those of a resumed sample begin with the tokens decoded here."""
        first = self._tokens[place][event.index]
        self._tokens[place][event.index] = last = first + len(event.token_ids)
        return self._jobs[place].samples[event.index].logprobs[first:last]

    @abstractmethod
    def _first_choices(self) -> Sequence[Mapping[str, object]]:
        """The choices to send before anything is decoded."""

    @abstractmethod
    def _index(self, place: int, sample: int) -> int:
        """The index of a choice among all."""

    @abstractmethod
    def _text(self, place: int, event: StreamEvent) -> Mapping[str, object]:
        """The field with the text that the event adds; empty if it adds none."""

    @abstractmethod
    def _logprobs(self, place: int, event: StreamEvent) -> Mapping[str, object] | None: ...

    @abstractmethod
    def _finish(self, sample: int, reason: FinishReason) -> str: ...

    def _reasoning_tokens(self, outputs: Sequence[RequestOutput]) -> int:
        return 0


def _pieces(pieces: Sequence[Piece]) -> dict[str, object]:
    """Texts with their sources, and with writers and origins if there are any."""
    found: dict[str, object] = {"pieces": [[piece.text, piece.source] for piece in pieces]}
    if any(piece.writer for piece in pieces):
        found["writers"] = [piece.writer or TARGET for piece in pieces]
    if any(piece.origin for piece in pieces):
        found["origins"] = [piece.origin and piece.origin._asdict() for piece in pieces]
    return found


class ChatChunks(OpenAIChunks):
    """Sends each choice's role first, then its deltas."""

    def __init__(self, job: Job, shape: ChatShape, usage: StreamUsage, ended: Collection[int] = ()) -> None:
        super().__init__("chat.completion.chunk", [job], shape, usage, ended)
        self._shape = shape
        self._readers = [shape.answers.reader() for _ in job.samples]
        for reader, sample in zip(self._readers, job.samples, strict=True):
            reader.feed(sample.released)  # sent by the replica that began the stream

    def _first_choices(self) -> Sequence[Mapping[str, object]]:
        begun = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{"index": index, **begun} for index in range(1 if self._votes else len(self._readers))]

    def _index(self, place: int, sample: int) -> int:
        return sample

    def _logprobs(self, place: int, event: StreamEvent) -> Mapping[str, object] | None:
        entries = self._entries(place, event) if self._shape.logprobs else []
        return self._shape.logprobs_of(entries) if entries else None

    def _finish(self, sample: int, reason: FinishReason) -> str:
        called = called_word(self._shape) if self._readers[sample].called else None
        return finish_word(reason, called=called)

    def _reasoning_tokens(self, outputs: Sequence[RequestOutput]) -> int:
        return sum(reasoning_tokens(sample, self._shape) for output in outputs for sample in output.outputs)

    def _text(self, place: int, event: StreamEvent) -> Mapping[str, object]:
        reader = self._readers[event.index]
        deltas = reader.feed(event.text)
        if event.finish_reason is not None:
            deltas += reader.finish()
        text = "".join(delta.text for delta in deltas if isinstance(delta, Text))
        thought = "".join(delta.text for delta in deltas if isinstance(delta, Thought))
        delta: dict[str, object] = {"reasoning_content": thought} if thought else {}
        if text:
            delta["content"] = text
        calls = _call_deltas(deltas)
        if calls and self._shape.legacy:
            delta["function_call"] = calls[0]["function"]
        elif calls:
            delta["tool_calls"] = calls
        return {"delta": delta}


def _call_deltas(deltas: Sequence[Delta]) -> list[dict[str, object]]:
    """One entry per call at most: the first has id and name, later ones more arguments."""
    entries: dict[int, dict[str, object]] = {}
    written: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta, Begin):
            entries[delta.call] = {"index": delta.call, "id": call_id(), "type": "function", "name": delta.name}
        elif isinstance(delta, Arguments):
            entries.setdefault(delta.call, {"index": delta.call})
            written[delta.call] = written.get(delta.call, "") + delta.text
    for call, entry in entries.items():
        named = {"name": entry.pop("name")} if "name" in entry else {}
        entry["function"] = named | {"arguments": written.get(call, "")}
    return list(entries.values())


class CompletionChunks(OpenAIChunks):
    """Sends the echo first, if the request asks for it."""

    def __init__(
        self, jobs: Sequence[Job], shape: CompletionShape, usage: StreamUsage, ended: Collection[int] = ()
    ) -> None:
        super().__init__("text_completion", jobs, shape, usage, ended)
        self._shape = shape
        self._speller = Speller(shape.tokenizer)

    def _first_choices(self) -> Sequence[Mapping[str, object]]:
        return [
            {"index": self._index(place, sample), "text": echo, "logprobs": None, "finish_reason": None}
            for place, echo in enumerate(self._shape.echoes or ())
            for sample in range(self._shape.n)
        ]

    def _index(self, place: int, sample: int) -> int:
        return self._shape.index(place, sample)

    def _text(self, place: int, event: StreamEvent) -> Mapping[str, object]:
        return {"text": event.text}

    def _finish(self, sample: int, reason: FinishReason) -> str:
        return finish_word(reason)

    def _logprobs(self, place: int, event: StreamEvent) -> Mapping[str, object] | None:
        if not self._shape.logprobs or not event.token_ids:
            return None
        sample, count = self._jobs[place].samples[event.index], len(event.token_ids)
        first = len(sample.request.written) + self._tokens[place][event.index]
        ends = sample.text.ends if sample.text is not None else ()
        table, own = CompletionTable(self._speller), begins(ends, first + count)[first:]
        for token, logprobs, begin in zip(event.token_ids, self._entries(place, event), own, strict=True):
            table.add(token, logprobs, begin)
        return table.columns
