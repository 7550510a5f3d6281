"""The frame that chunks of `/v1/chat/completions` and `/v1/completions` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from typing_extensions import TypedDict

from parlay.llm.jobs import Job
from parlay.llm.outputs import CompletionOutput, Piece, RequestOutput, StreamEvent
from parlay.serve.errors import ApiError
from parlay.serve.protocol.answering import Chunk, DataFrames
from parlay.serve.protocol.steps_ahead import ahead_reply
from parlay.serve.protocol.usage import RunningUsage, StreamUsage, last_chunks
from parlay.serve.protocol.voting import vote_reply
from parlay.types import TARGET, FinishReason, TokenLogprobs

WHOLE_VOTE = "a vote sends its text when it is over"
"""Why its stream can't be resumed."""


class AttributionReply(TypedDict):
    """A part of the text that is mostly from one place of the datastore: so many tokens of a document, from the token
    at ``position`` on. ``share`` is the part of their probability that the datastore gave.
    """

    text: str
    document: str
    position: int
    tokens: int
    share: float


def attributions_reply(sample: CompletionOutput) -> list[AttributionReply]:
    """The parts of a text that are mostly from the datastore, as JSON has them."""
    return [
        {
            "text": part.text,
            "document": part.document,
            "position": part.position,
            "tokens": part.tokens,
            "share": part.share,
        }
        for part in sample.attributions
    ]


class ReplyShape(Protocol):
    """Facts that all replies to one request share."""

    @property
    def id(self) -> str: ...
    @property
    def created(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def explain(self) -> bool: ...


def chunk_frames(shape: ReplyShape, kind: str) -> DataFrames:
    """Frame the chunks of a stream with what all of them say; ``kind`` names what they are."""
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
    """Makes the chunks of a stream from what each step adds; ``kind`` is their ``object``.

    ``ended`` are choices whose end was sent by the server that began the stream.
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
        """The whole text of the chain that a vote has chosen; None until the vote is over."""
        if output is None or output.vote is None:
            return None
        one = output.chosen
        choice = self._choice(place, StreamEvent(one.index, one.pieces, one.token_ids, one.finish_reason, output))
        assert choice is not None, "it has ended"
        return {**choice, "index": self._index(place, 0), "vote": vote_reply(output.vote)}

    def _choice(self, place: int, event: StreamEvent) -> Mapping[str, object] | None:
        """None for a step that adds nothing yet."""
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
        """The log-probabilities of the event's tokens; those of a resumed sample begin with what is decoded here."""
        first = self._tokens[place][event.index]
        self._tokens[place][event.index] = last = first + len(event.token_ids)
        return self._jobs[place].samples[event.index].logprobs[first:last]

    @abstractmethod
    def _first_choices(self) -> Sequence[Mapping[str, object]]:
        """Choices to send before anything is decoded."""

    @abstractmethod
    def _index(self, place: int, sample: int) -> int:
        """The number of a choice among all."""

    @abstractmethod
    def _text(self, place: int, event: StreamEvent) -> Mapping[str, object]:
        """The field that holds what the event adds to the text; empty where it adds nothing."""

    @abstractmethod
    def _logprobs(self, place: int, event: StreamEvent) -> Mapping[str, object] | None: ...

    @abstractmethod
    def _finish(self, sample: int, reason: FinishReason) -> str: ...

    def _reasoning_tokens(self, outputs: Sequence[RequestOutput]) -> int:
        return 0


def _pieces(pieces: Sequence[Piece]) -> dict[str, object]:
    """Texts with their sources, and writers and origins where there are some."""
    found: dict[str, object] = {"pieces": [[piece.text, piece.source] for piece in pieces]}
    if any(piece.writer for piece in pieces):
        found["writers"] = [piece.writer or TARGET for piece in pieces]
    if any(piece.origin for piece in pieces):
        found["origins"] = [piece.origin and piece.origin._asdict() for piece in pieces]
    return found
