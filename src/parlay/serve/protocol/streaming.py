"""Streams of JSON chunks while a run goes on, in the frames of each protocol."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from parlay.llm.outputs import StreamEvent
from parlay.serve.errors import ApiError, convert
from parlay.serve.protocol.running import Run
from parlay.types import ParlayError

logger = logging.getLogger(__name__)

Chunk = Mapping[str, object]
EVENT_STREAM = "text/event-stream"


class Frames(Protocol):
    """How chunks are written one after another."""

    @property
    def media_type(self) -> str: ...

    @property
    def end(self) -> bytes:
        """What follows the last chunk of a stream that ended well."""
        ...

    def encode(self, chunk: Chunk) -> bytes: ...


class DataFrames:
    """OpenAI's: server-sent events without names, ended by ``[DONE]``. ``shared`` are fields that all chunks have."""

    media_type = EVENT_STREAM
    end = b"data: [DONE]\n\n"

    def __init__(self, shared: Chunk) -> None:
        self._head = b"data: " + to_json(shared)[:-1] + b","

    def encode(self, chunk: Chunk) -> bytes:
        """An error stands alone."""
        if "error" in chunk:
            return b"data: " + to_json(chunk) + b"\n\n"
        return self._head + to_json(chunk)[1:] + b"\n\n"


class NamedFrames:
    """Server-sent events that are named as their ``type``; nothing follows the last one."""

    media_type = EVENT_STREAM
    end = b""

    def encode(self, chunk: Chunk) -> bytes:
        return f"event: {chunk['type']}\ndata: ".encode() + to_json(chunk) + b"\n\n"


class LineFrames:
    """A chunk a line; nothing follows the last one."""

    media_type = "application/x-ndjson"
    end = b""

    def encode(self, chunk: Chunk) -> bytes:
        return to_json(chunk) + b"\n"


class Chunks(Protocol):
    """What a stream tells of its events."""

    @property
    def frames(self) -> Frames: ...

    def opening(self) -> Sequence[Chunk]:
        """Those that come before anything is decoded."""
        ...

    def tell(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        """Those of an event of the job at ``place``. The last of them all carries what is known of the whole."""
        ...

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        """The last ones of a stream that fails midway."""
        ...


class EventStream(StreamingResponse):
    """The chunks of a run that has started. However the response ends, the run is closed with it."""

    def __init__(self, run: Run, chunks: Chunks, headers: Mapping[str, str]) -> None:
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(_lines(run, chunks), headers=own, media_type=chunks.frames.media_type)
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._run.close()


async def _lines(run: Run, chunks: Chunks) -> AsyncGenerator[bytes]:
    """Each step at once, or all that came while the client was not reading.

    The status has been sent, so an error becomes the last event.
    """
    frames = chunks.frames
    lines = [frames.encode(chunk) for chunk in chunks.opening()]
    try:
        while not run.told:
            if lines:
                yield b"".join(lines)
                lines = []
            for place, event in await run.news():
                run.heed(place, event)
                lines += [frames.encode(chunk) for chunk in chunks.tell(place, event)]
        lines.append(frames.end)
    except Exception as error:
        if not isinstance(error, ApiError | ParlayError):
            logger.exception("a stream ends early by a fault of the server")
        lines += [frames.encode(chunk) for chunk in chunks.failure(convert(error))]
    yield b"".join(lines)
