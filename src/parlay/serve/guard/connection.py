"""One client's connection, which limits bytes received and each wait for the client."""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Callable
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from parlay.serve.errors import ApiError, unavailable
from parlay.serve.request_ids import HEADER, naming, new_id, request_id

HEADER_BYTES = 64 * 1024
"""Most bytes of a head, of a body's trailers, and of chunk framing beyond `FRAMING`."""
HEADER_SECONDS = 20.0
"""Seconds from the start of a connection, or the end of an answer, to the end of the next head. Receiving bytes does
not extend them.

Clients keep idle connections for 5 seconds (httpx, and so OpenAI's client) or 15 (aiohttp). If the server closed one
earlier, a request that the client is just sending would be lost.
"""
FRAMING = 8
"""Bytes of chunk framing allowed per byte of the body; chunks of one byte take five."""
DROPPED_BYTES = 16 * 1024 * 1024
DROPPED_SECONDS = 5.0
"""The most bytes and seconds of a body that are read and dropped after its answer, so that the client can finish
sending and read the answer. Closing at once would reset the connection, and the client would lose the answer."""
UNREAD_SECONDS = 120.0
"""Seconds that a client may leave an answer unread."""
PIPELINED = 64
"""Most requests that wait behind the one being answered."""
_PIECE = 16 * 1024  # bytes parsed at once
_PROBE_SECONDS = 0.5
LEAVING = "leaving"
"""The entry of a request's state that holds the `Leaving` of its connection."""
PARTS = "parts"
"""The entry of a request's state that holds the `Parts` of its answer."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def most_connections() -> int:
    """The most open connections: three quarters of the process's file descriptors."""
    return max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)


class Leaving:
    """Whether a connection's client has gone, and callbacks in ``tell`` for that moment; cheaper than a waiting
    task."""

    def __init__(self) -> None:
        self.gone = False
        self.tell: set[Callable[[], object]] = set()

    def note(self) -> None:
        """Note that the client has gone."""
        self.gone = True
        for call in list(self.tell):
            call()


class Parts:
    """Writes parts of an answer at once, for callbacks of the event loop, which can't await ASGI's ``send``."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def asked(self) -> bool:
        """Whether the whole body of the request has come."""
        return not self._cycle.more_body

    @property
    def begun(self) -> bool:
        """Whether the head has been sent."""
        return self._cycle.response_started

    def write(self, data: bytes) -> bool:
        """Write bytes if the head has been sent, the answer is chunked, and the client keeps reading.

        Returns whether they were written.
        """
        cycle = self._cycle
        if not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected or cycle.flow.write_paused:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class _LastWord:
    """ASGI middleware that answers a request with an error if the server abandons it before its answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            parts: Parts = scope["state"][PARTS]
            if parts.begun:
                raise
            await unavailable(1).response(scope["path"])(scope, receive, naming(scope, send))


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits that it lacks.

    - A head above `HEADER_BYTES` gets 431; one that is not complete after `HEADER_SECONDS` gets 408.
    - Trailers and the framing of chunks are bounded, and trailers are not kept.
    - After an answer that came before the end of the body, the rest is dropped and the connection closes.
    - A client that half-closes after its request gets the answer; within its request, it gets 400.
    - A request of which the body is still coming when the server ends gets 503.
    - Where `most_connections` are open, the one that waits for its client, and has waited longest, is closed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = _LastWord(self.app)
        self._size = 0
        """Bytes of the part being read; see `_count`."""
        self._body = 0
        self._part_ended = False
        self._reading_head = self._reading_body = False
        self._keep_alive = False
        self._half_closed = False
        self._dropping: int | None = None
        """Bytes that may still be dropped before the connection closes; None while requests are read."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the wait for bytes from the client."""
        self._unread: asyncio.TimerHandle | None = None
        """Timer of the wait for the client to read."""
        self._leaving = Leaving()
        self._answered: RequestResponseCycle | None = None
        """The request being answered; `cycle` is the one read last, which may wait behind it."""

    # ------------------------------------------------------------------------------------------------ asyncio's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > most_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._leaving.note()

    def data_received(self, data: bytes) -> None:
        while data and self._dropping is None and not self.transport.is_closing():
            room = _PIECE if self._reading_body else min(_PIECE, HEADER_BYTES - self._size)
            piece, data = data[:room], data[room:]
            self._body, self._part_ended = 0, False
            super().data_received(piece)
            if self._dropping is None:
                self._count(len(piece))
        if self._dropping is not None:
            self._drop(len(data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: only while a complete request waits for its answer. An incomplete one is
        refused."""
        answering = self.cycle is not None and not self.cycle.response_complete and not self._reading_body
        if answering and self._dropping is None:
            self._half_closed = True
            self._probe()
            return True
        if self._dropping is None and self._reading_head:
            self._refuse(ApiError(400, "the request ended within its headers: end them by an empty line"))
        elif self._dropping is None and self._awaits_body:
            remedy = "send as many bytes as Content-Length says, or a last chunk of size 0"
            self._refuse(ApiError(400, f"the body ended too early: {remedy}"))
        return False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    # ----------------------------------------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._size, self._reading_head = 0, True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._reading_body:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_part()
        self.scope["state"][LEAVING] = self._leaving
        super().on_headers_complete()
        self._reading_head, self._reading_body = False, True
        self.cycle.transport = _AnswerTransport(self)
        self.scope["state"][PARTS] = Parts(self.cycle)
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False  # until the whole body has come
        self._stop_timer()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading_body = False
        self._end_part()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin the next request. uvicorn's own method would also start a timer of its own."""
        self.server_state.total_requests += 1
        if self._dropping is not None or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._half_closed:
            self.close()
        else:
            self._expect_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)
        if self._half_closed:
            self._probe()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not an HTTP request that the server can read"))

    # --------------------------------------------------------------------------------------------------------- bounds

    @property
    def _awaits_body(self) -> bool:
        """Whether the request to be answered is still coming, and its answer has not begun."""
        return self._reading_body and self.cycle is self._answered and not self.cycle.response_started

    def _end_part(self) -> None:
        self._size, self._part_ended = 0, True

    def _count(self, size: int) -> None:
        """Count received bytes. Each byte of a body allows `FRAMING` bytes of framing."""
        if len(self.pipeline) > PIPELINED:
            self.transport.abort()
        elif not self._part_ended:
            self._size = max(0, self._size + size - (1 + FRAMING) * self._body)
            if self._size >= HEADER_BYTES:
                what = "what frames the body is" if self._reading_body else "the headers are"
                self._refuse(ApiError(431, f"{what} larger than {HEADER_BYTES} bytes: send less"))

    def _drop(self, size: int) -> None:
        assert self._dropping is not None
        self._dropping -= size
        if self._dropping < 0:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error and close. There is no answer if no request has begun, or if another one is being
        answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or not self._reading_body or self.cycle is not self._answered:
                return self.transport.abort()
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        elif not self._reading_head and error.status == 408:
            return self.close()
        answer = error.response(self.scope["path"] if self._reading_body else "")
        name = request_id(cast(Scope, self.scope)) if self._reading_body else new_id()
        headers = [*answer.raw_headers, (HEADER, name.encode())]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 %d \r\n%bconnection: close\r\n\r\n" % (error.status, head) + bytes(answer.body))
        self._close_gently()

    # --------------------------------------------------------------------------------------------------- ends of waits

    @property
    def waits_until(self) -> float | None:
        """When its wait for the client ends: infinity during a body, whose time the application limits; None if it does
        not wait."""
        if self._timer is not None:
            return self._timer.when()
        return math.inf if self._reading_body else None

    def _expect_head(self) -> None:
        self._start_timer(HEADER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self._refuse(ApiError(408, "the headers took too long to arrive"))

    def _expect_reading(self) -> None:
        self._stop_unread()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def _start_timer(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, call, *arguments)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def shutdown(self) -> None:
        """Close after the answer under way. A request whose body is incomplete and whose answer has not begun is
        refused."""
        if self._awaits_body:
            self._refuse(unavailable(1))
        else:
            super().shutdown()

    def close(self) -> None:
        """Close after the answer has been sent; if the request is incomplete, only when the client had time to read the
        answer."""
        if self._reading_body or self._dropping is not None:
            self._close_gently()
        else:
            self._expect_reading()
            self.transport.close()

    def _close_gently(self) -> None:
        """Signal the end of the answer, and drop what still arrives, up to a limit."""
        if self._dropping is not None:
            return
        self._dropping = DROPPED_BYTES
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._start_timer(DROPPED_SECONDS, self.transport.abort)

    def _make_room(self) -> None:
        """Close the connection whose wait for its client ends next, or the new one if no other waits."""
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
        waiting = {one: one.waits_until for one in others if one.waits_until is not None}
        (min(waiting, key=waiting.__getitem__) if waiting else self).transport.abort()

    def _probe(self) -> None:
        """Test whether a client that has half-closed is still there: a dead one answers any byte with a reset.

        HTTP/1.1 clients skip an interim response; older ones are not tested.
        """
        assert self._answered is not None
        if self.transport.is_closing() or self._answered.response_started or self.scope["http_version"] == "1.0":
            return
        self.transport.write(_CONTINUE)
        self._start_timer(_PROBE_SECONDS, self._probe)


class _AnswerTransport(asyncio.Transport):
    """The transport as an answer sees it: closing it leaves the client time to read.

    The head is sent together with what is written in the same turn of the event loop, as each write is a system call.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._head: bytes | None = None
        """None before the head, empty after it has been sent."""

    def write(self, data: Any) -> None:
        if self._head is None:
            self._head = data
            self._connection.loop.call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            self._connection.transport.write(head + data)
        else:
            self._connection.transport.write(data)

    def _flush(self) -> None:
        if self._head and not self.is_closing():  # the client may have gone since
            head, self._head = self._head, b""
            self._connection.transport.write(head)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._connection.close()
