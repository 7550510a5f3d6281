"""Reads bodies, and answers requests whole or as a stream of chunks, until the client has gone: for all routes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json, to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from parlay.llm.outputs import RequestOutput, StreamEvent
from parlay.serve.error_handlers import convert
from parlay.serve.errors import ApiError, ErrorBody, responses
from parlay.serve.guard.workers import LIGHT_BYTES, Workers
from parlay.serve.protocol.body import ignored_header
from parlay.serve.protocol.resume_comments import EVENT_STREAM
from parlay.serve.protocol.running import ClientGone, Run, while_client_waits
from parlay.types import ParlayError

logger = logging.getLogger(__name__)

Chunk = Mapping[str, object]
COMMENT = ":"
"""The key of a chunk's comment in a resumable stream. A chunk may hold nothing else."""


class Frames(Protocol):
    """How chunks are written one after another."""

    @property
    def media_type(self) -> str: ...

    @property
    def end(self) -> bytes:
        """Bytes after the last chunk of a stream that ended well."""
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
    """Makes a stream's chunks of its events."""

    @property
    def frames(self) -> Frames: ...

    def opening(self) -> Sequence[Chunk]:
        """Chunks to send before anything is decoded."""
        ...

    def add(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        """Chunks for an event of the job at ``place``. The last chunk carries the facts of the whole request."""
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
        while not run.finished:
            if lines:
                yield b"".join(lines)
                lines = []
            for place, event in await run.news():
                run.note(place, event)
                lines += [frames.encode(chunk) for chunk in chunks.add(place, event)]
        lines.append(frames.end)
    except Exception as error:
        if not isinstance(error, ApiError | ParlayError):
            logger.exception("a stream ends early by a fault of the server")
        lines += [frames.encode(chunk) for chunk in chunks.failure(convert(error))]
    yield b"".join(lines)


T = TypeVar("T")

_FEW_LOGPROBS = 4096
"""Above it a reply is written in a thread: with 20 alternatives to each token of a long prompt that takes seconds."""
_CLIENT_GONE = 499  # for the log: nobody reads the answer
_FORM = b"application/x-www-form-urlencoded"
_OF_PAGES = frozenset({b"origin", b"sec-fetch-site"})
"""Headers that only browsers send."""
_MOST_LEVELS = 200
"""The parser's own limit."""
_REASONS = {
    "recursion limit exceeded": f"it has more than {_MOST_LEVELS} levels",
    "hex escape": "it holds half of a surrogate pair, which is no character",
    "invalid unicode code point": "it holds bytes that are not UTF-8",
}
"""Clearer words for some of the parser's messages."""


class BodyRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handle(_JsonRequest(_as_json(request.scope), request.receive))

        return answer


class _JsonRequest(Request):
    async def json(self) -> Any:
        value = read_json(await self.body())
        await asyncio.sleep(0)  # others have their turn before the value is looked through, which takes as long again
        return value


def _as_json(scope: Scope) -> Scope:
    """Some clients send JSON and do not say so; curl calls it a form. A web page that may send nothing here can do that
    too, but any request of a page to another origin says where it comes from.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    types = {value.lower() for name, value in headers if name == b"content-type"}
    if types - {_FORM} or any(name in _OF_PAGES for name, _ in headers):
        return scope
    others = [(name, value) for name, value in headers if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def read_json(body: bytes) -> Any:
    """Three times as fast as the standard library, and strict about text. Raises JSONDecodeError."""
    try:
        return from_json(body.removeprefix(b"\xef\xbb\xbf"), cache_strings=False)
    except ValueError as error:
        reason = str(error)
        raise json.JSONDecodeError(
            next((plain for part, plain in _REASONS.items() if part in reason), reason), "", 0
        ) from None


async def read(request: Request, reader: Callable[[], T]) -> T:
    """Call ``reader``, which goes through the body: here where the body is small, else in a thread. Raises ApiError."""
    return reader() if request.state.body_bytes <= LIGHT_BYTES else await in_thread(request, reader, heavy=False)


async def in_thread(request: Request, prepare: Callable[[], T], *, heavy: bool) -> T:
    """Call ``prepare`` in a thread: encoding takes time, compiling a form is ``heavy``.

    Raises ApiError.
    """
    workers: Workers = request.app.state.workers
    return await workers.call(request, prepare, heavy=heavy)


async def answer_whole(
    request: Request,
    run: Run,
    reply: Callable[[list[RequestOutput]], Response],
    work: Callable[[], Coroutine[Any, Any, list[RequestOutput]]] | None = None,
) -> Response:
    """``work`` starts the run and decodes what is wanted; None: all. Raises ApiError, Busy and Closed."""

    async def answered() -> Response:
        outputs = await outputs_of(run, work)
        return reply(outputs) if _logprobs(outputs) <= _FEW_LOGPROBS else await asyncio.to_thread(reply, outputs)

    return await answer_work(request, answered(), lambda answer: answer)


def _logprobs(outputs: Sequence[RequestOutput]) -> int:
    """How many log-probabilities are to be written, alternatives included."""
    prompts = (output.prompt_logprobs for output in outputs)
    samples = (sample.logprobs for output in outputs for sample in output.outputs)
    entries = (entry for each in (*prompts, *samples) if each is not None for entry in each.entries)
    return sum(len(entry.top) + 1 for entry in entries if entry is not None)


async def answer_work(request: Request, work: Coroutine[Any, Any, T], reply: Callable[[T], Response]) -> Response:
    """Answer with what comes of ``work``, which ends when the client leaves. Raises what it raises."""
    try:
        answer = reply(await while_client_waits(request, work))
    except ClientGone:
        return nobody_waits()
    answer.headers.update(ignored_header(request))
    return answer


def nobody_waits() -> Response:
    """The answer to a client that has gone."""
    return Response(status_code=_CLIENT_GONE)


async def outputs_of(
    run: Run, work: Callable[[], Coroutine[Any, Any, list[RequestOutput]]] | None = None
) -> list[RequestOutput]:
    """Start a run, decode all or do its ``work``, and close it."""
    try:
        if work is not None:
            return await work()
        await run.start(whole=True)
        return await run.outputs()
    finally:
        await run.close()


async def answer_streamed(
    request: Request, run: Run, chunks: Chunks, headers: Mapping[str, str] | None = None
) -> Response:
    """Start the run and stream it. Raises ApiError, Busy and Closed before the stream begins."""
    await run.start()
    return EventStream(run, chunks, {**ignored_header(request), **(headers or {})})


_EVENT = {
    "type": "object",
    "description": "One event of the stream.",
    "properties": {"data": {"type": "string", "description": "a chunk as JSON, or `[DONE]`"}},
    "required": ["data"],
}


def described(reply: type, failure: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The entries of the OpenAPI document: the reply, or its chunks, and every failure."""
    done = {
        "model": reply,
        "description": "The whole answer; with `stream`, its chunks as server-sent events, ended by `[DONE]`.",
        "content": {EVENT_STREAM: {"schema": _EVENT}},
    }
    return {200: done, **responses(400, 404, 408, 413, 429, 500, 503, body=failure)}
