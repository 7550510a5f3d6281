"""Server-sent events: a stream of JSON chunks, ended by ``[DONE]``, or by an error."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from parlay.serve.errors import ApiError, convert
from parlay.serve.running import Run
from parlay.types import ParlayError

logger = logging.getLogger(__name__)

Chunks = AsyncGenerator[Mapping[str, object]]
MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"


def encode(chunk: Mapping[str, object]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """The chunks of a run that has started. However the response ends, the run is closed with it."""

    def __init__(self, run: Run, chunks: Chunks) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_lines(chunks), headers=headers, media_type=MEDIA_TYPE)
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._run.close()


async def _lines(chunks: Chunks) -> AsyncGenerator[bytes]:
    """The status has been sent, so an error becomes the last event."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield encode(chunk)
        except Exception as error:
            if not isinstance(error, ApiError | ParlayError):
                logger.exception("a stream ends early by a fault of the server")
            yield encode(convert(error).body)
            return
    yield DONE
