"""Server-sent events: a stream of JSON chunks, ended by ``[DONE]``, or by an error."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from parlay.outputs import StreamEvent
from parlay.serve.errors import ApiError, convert
from parlay.serve.running import Run
from parlay.types import ParlayError

logger = logging.getLogger(__name__)

Chunk = Mapping[str, object]
MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


class Chunks(Protocol):
    """What a stream tells of its events, as the fields of chunks in which they differ."""

    @property
    def shared(self) -> Chunk:
        """The fields that are the same in all of them; at least one."""
        ...

    def opening(self) -> Sequence[Chunk]:
        """Those that come before anything is decoded."""
        ...

    def tell(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        """Those of an event of the job at ``place``. The last of them all carries what is known of the whole."""
        ...


class EventStream(StreamingResponse):
    """The chunks of a run that has started. However the response ends, the run is closed with it."""

    def __init__(self, run: Run, chunks: Chunks) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_lines(run, chunks), headers=headers, media_type=MEDIA_TYPE)
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
    head = _encode(chunks.shared).removesuffix(b"}\n\n")
    lines = [_more(head, chunk) for chunk in chunks.opening()]
    try:
        while not run.told:
            if lines:
                yield b"".join(lines)
                lines = []
            for place, event in await run.news():
                run.heed(place, event)
                for chunk in chunks.tell(place, event):
                    lines.append(_more(head, chunk))
        lines.append(DONE)
    except Exception as error:
        if not isinstance(error, ApiError | ParlayError):
            logger.exception("a stream ends early by a fault of the server")
        lines.append(_encode(convert(error).body))
    yield b"".join(lines)


def _encode(chunk: Chunk) -> bytes:
    return b"data: " + to_json(chunk) + b"\n\n"


def _more(head: bytes, chunk: Chunk) -> bytes:
    """An event that begins with ``head``, an encoded object without its end."""
    return head + b"," + to_json(chunk)[1:] + b"\n\n"
