"""Reads bodies, and answers requests as a whole or as a stream of chunks; stops when the client leaves."""

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
from parlay.serve.protocol import DONE_EVENT
from parlay.serve.protocol.body import ignored_header
from parlay.serve.protocol.resume_comments import EVENT_STREAM
from parlay.serve.protocol.running import ClientGone, Run, while_client_waits
from parlay.types import ParlayError

logger = logging.getLogger(__name__)

Chunk = Mapping[str, object]
COMMENT = ":"
"""The key of a chunk's comment in a resumable stream. A chunk may consist of a comment only."""


class Frames(Protocol):
    """How chunks are encoded as a stream of bytes."""

    @property
    def media_type(self) -> str: ...

    @property
    def end(self) -> bytes:
        """Bytes after the last chunk of a stream that ended without an error."""
        ...

    def encode(self, chunk: Chunk) -> bytes: ...


class DataFrames:
    """OpenAI's frames: server-sent events without names, ended by ``[DONE]``; all chunks get the fields ``shared``."""

    media_type = EVENT_STREAM
    end = f"{DONE_EVENT}\n\n".encode()

    def __init__(self, shared: Chunk) -> None:
        self._head = b"data: " + to_json(shared)[:-1] + b","

    def encode(self, chunk: Chunk) -> bytes:
        """Encode a chunk; an error gets no shared fields."""
        if "error" in chunk:
            return b"data: " + to_json(chunk) + b"\n\n"
        return self._head + to_json(chunk)[1:] + b"\n\n"


class NamedFrames:
    """Server-sent events named by their ``type``, without a closing event."""

    media_type = EVENT_STREAM
    end = b""

    def encode(self, chunk: Chunk) -> bytes:
        return f"event: {chunk['type']}\ndata: ".encode() + to_json(chunk) + b"\n\n"


class LineFrames:
    """One chunk per line, without a closing line."""

    media_type = "application/x-ndjson"
    end = b""

    def encode(self, chunk: Chunk) -> bytes:
        return to_json(chunk) + b"\n"


class Chunks(Protocol):
    """Turns the events of a run into the chunks of a stream."""

    @property
    def frames(self) -> Frames: ...

    def opening(self) -> Sequence[Chunk]:
        """The chunks to send before anything is decoded."""
        ...

    def add(self, place: int, event: StreamEvent) -> Sequence[Chunk]:
        """The chunks for an event of the job at ``place``; the last one has the facts of the whole request."""
        ...

    def failure(self, error: ApiError) -> Sequence[Chunk]:
        """The last chunks of a stream that fails."""
        ...


class EventStream(StreamingResponse):
    """Streams the chunks of a run that has started; however the response ends, it closes the run."""

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
    """Yield the lines of each step at once, or of all steps that came while the client was not reading.

    An error becomes the last event, as the status has been sent already.
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
            logger.exception("an internal error ended a stream early")
        lines += [frames.encode(chunk) for chunk in chunks.failure(convert(error))]
    yield b"".join(lines)


T = TypeVar("T")

_FEW_LOGPROBS = 4096
"""A reply with more log-probabilities is written in a thread: for a long prompt with 20 alternatives per token that
takes seconds."""
_CLIENT_GONE = 499  # for the log: nobody reads the answer
_FORM = b"application/x-www-form-urlencoded"
_OF_PAGES = frozenset({b"origin", b"sec-fetch-site"})
"""Headers that only browsers send."""
_MOST_LEVELS = 200
"""The parser's own limit."""
_REASONS = {
    "recursion limit exceeded": f"it has more than {_MOST_LEVELS} levels",
    "hex escape": "it holds half of a surrogate pair, which is not a character",
    "invalid unicode code point": "it holds bytes that are not UTF-8",
}
"""Clearer texts for some of the parser's messages."""


class BodyRoute(APIRoute):
    """A route whose request's JSON is parsed by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handle(_JsonRequest(_as_json(request.scope), request.receive))

        return answer


class _JsonRequest(Request):
    async def json(self) -> Any:
        value = read_json(await self.body())
        await asyncio.sleep(0)  # lets others run before the value is validated, which takes as long again
        return value


def _as_json(scope: Scope) -> Scope:
    """Mark the request as JSON, as some clients don't, and curl calls it a form. A web page of another origin could
    send JSON in this way, too, but its requests carry an Origin, and are left as they are."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    types = {value.lower() for name, value in headers if name == b"content-type"}
    if types - {_FORM} or any(name in _OF_PAGES for name, _ in headers):
        return scope
    others = [(name, value) for name, value in headers if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def read_json(body: bytes) -> Any:
    """Parse JSON three times as fast as the standard library, and strictly about text. Raises JSONDecodeError."""
    try:
        return from_json(body.removeprefix(b"\xef\xbb\xbf"), cache_strings=False)
    except ValueError as error:
        reason = str(error)
        raise json.JSONDecodeError(
            next((plain for part, plain in _REASONS.items() if part in reason), reason), "", 0
        ) from None


async def read(request: Request, reader: Callable[[], T]) -> T:
    """Call ``reader`` to process the body: here if it is small, else in a thread. Raises ApiError as ``reader``
    does."""
    return reader() if request.state.body_bytes <= LIGHT_BYTES else await in_thread(request, reader, heavy=False)


async def in_thread(request: Request, prepare: Callable[[], T], *, heavy: bool) -> T:
    """Call ``prepare`` in a thread, as tokenizing takes time; compiling a form is ``heavy``.

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
    """Decode a run, and answer with the whole reply; ``work`` starts the run and decodes a part of it (None: decode
    all). Raises ApiError, Busy and Closed."""

    async def answered() -> Response:
        outputs = await outputs_of(run, work)
        return reply(outputs) if _logprobs(outputs) <= _FEW_LOGPROBS else await asyncio.to_thread(reply, outputs)

    return await answer_work(request, answered(), lambda answer: answer)


def _logprobs(outputs: Sequence[RequestOutput]) -> int:
    """How many log-probabilities will be written, including alternatives."""
    prompts = (output.prompt_logprobs for output in outputs)
    samples = (sample.logprobs for output in outputs for sample in output.outputs)
    entries = (entry for each in (*prompts, *samples) if each is not None for entry in each.entries)
    return sum(len(entry.top) + 1 for entry in entries if entry is not None)


async def answer_work(request: Request, work: Coroutine[Any, Any, T], reply: Callable[[T], Response]) -> Response:
    """Answer with the result of ``work``, which is cancelled when the client leaves. Raises what ``work`` raises."""
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
    """Start a run, decode it (or do ``work`` instead), and close it."""
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
    """Start the run, and stream its chunks. Raises ApiError, Busy and Closed before the stream begins."""
    await run.start()
    return EventStream(run, chunks, {**ignored_header(request), **(headers or {})})


_EVENT = {
    "type": "object",
    "description": "One event of the stream.",
    "properties": {"data": {"type": "string", "description": "a chunk as JSON, or `[DONE]`"}},
    "required": ["data"],
}


def described(reply: type, failure: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of a route: the reply, its stream of chunks, and all errors."""
    done = {
        "model": reply,
        "description": "The whole answer; with `stream`, its chunks as server-sent events, ended by `[DONE]`.",
        "content": {EVENT_STREAM: {"schema": _EVENT}},
    }
    return {200: done, **responses(400, 404, 408, 413, 429, 500, 503, body=failure)}
