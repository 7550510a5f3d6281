"""How both kinds of request are answered: whole or streamed, and given up when the client has gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from parlay.llm.outputs import RequestOutput
from parlay.serve.errors import ErrorBody, responses
from parlay.serve.guard.workers import Workers
from parlay.serve.protocol.extras import ignored_header
from parlay.serve.protocol.running import ClientGone, Run, while_client_waits
from parlay.serve.protocol.streaming import EVENT_STREAM, Chunks, EventStream

T = TypeVar("T")

_CLIENT_GONE = 499  # for the log: nobody reads the answer


async def in_thread(request: Request, prepare: Callable[[], T], *, heavy: bool) -> T:
    """What ``prepare`` returns or raises, called in a thread: encoding takes time, compiling a form is ``heavy``.

    Raises ApiError.
    """
    workers: Workers = request.app.state.workers
    return await workers.call(request, prepare, heavy=heavy)


async def answer_whole(request: Request, run: Run, reply: Callable[[list[RequestOutput]], Response]) -> Response:
    """Raises ApiError, Busy and Closed."""
    try:
        answer = reply(await while_client_waits(request, _finish(run)))
    except ClientGone:
        return Response(status_code=_CLIENT_GONE)
    answer.headers.update(ignored_header(request))
    return answer


async def _finish(run: Run) -> list[RequestOutput]:
    try:
        await run.start(whole=True)
        return await run.outputs()
    finally:
        await run.close()


async def answer_streamed(request: Request, run: Run, chunks: Chunks) -> Response:
    """What can't run is refused before the stream begins. Raises ApiError, Busy and Closed."""
    await run.start()
    return EventStream(run, chunks, ignored_header(request))


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
