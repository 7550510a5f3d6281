"""An HTTP/1.1 client for replicas: one request at a time per connection, limits on the reply's size, and an error for
every failure."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

from httptools import HttpParserError, HttpResponseParser

from parlay.gateway.settings import Address
from parlay.serve.errors import ApiError

Headers = list[tuple[bytes, bytes]]

HEAD_BYTES = 64 * 1024
"""The most bytes of a reply's head."""
BUFFERED_BYTES = 256 * 1024
"""Reading from a replica pauses while this many bytes wait for the client."""
IDLE = 64
"""The most idle connections kept per replica."""
_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"upgrade"}
    | {b"transfer-encoding", b"content-length", b"proxy-connection"}
)
"""Headers that concern one connection only, so they are not passed on."""
_SIZES = frozenset({b"content-length", b"transfer-encoding"})


class ReplicaLost(Exception):
    """Raised if the connection ended early or the reply is not HTTP; the message gives the reason in a few words."""


class NoFiles(ApiError):
    """Raised if the gateway has no file descriptor for a connection. No replica is to blame, so no other replica is
    tried."""

    def __init__(self) -> None:
        message = "this gateway has as many connections as its system allows (ulimit -n): try again later"
        super().__init__(503, message, code="unavailable", headers={"Retry-After": "1"})


def passed_on(headers: Iterable[tuple[bytes, bytes]], *others: bytes) -> Headers:
    """Return the headers that are passed on: all but the connection's own, those that ``connection`` names (RFC 9110,
    section 7.6.1) and ``others``. All names must be in lower case."""
    given = list(headers)
    named = b",".join(value for name, value in given if name == b"connection").lower().split(b",")
    dropped = _HOP.union(others, map(bytes.strip, named))
    return [header for header in given if header[0] not in dropped]


@dataclass(slots=True)
class Head:
    """Status and headers of a reply, names in lower case."""

    status: int
    headers: Headers = field(default_factory=list)
    sized: bool = False
    """Whether the reply says where its body ends; otherwise that is where the replica closes the connection."""

    def get(self, name: bytes) -> bytes:
        """Return the first header of this name; empty if there is none."""
        for own, value in self.headers:
            if own == name:
                return value
        return b""


class Connection(asyncio.Protocol):
    """One connection to a replica. `send` a request, then `read` until the body ends."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pieces: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self._error: ReplicaLost | None = None
        self._paused = False
        self.age = 0
        """The age of the pool when it made the connection."""
        self.on_end: Callable[[Connection], None] | None = None
        """Called when a reply that nobody reads any more has ended."""
        self._parser = HttpResponseParser(self)
        """Parses all replies. It can be used again because the connection is reused only after a complete reply."""
        self._begin()

    def _begin(self) -> None:
        self._head = Head(0)
        self._head_bytes = self._buffered = 0
        self._head_complete = self._complete = self._stays = False
        self.heard = 0.0
        """When the last bytes of the reply came; 0 before the first."""

    # ------------------------------------------------------------------------------------------------ the caller's

    async def send(self, request: bytes) -> Head:
        """Send a whole request, and wait for the reply's head. Raises ReplicaLost if that fails."""
        assert self._transport is not None
        self._begin()
        self._transport.write(request)
        while not self._head_complete:
            await self._more()
        return self._head

    async def read(self) -> bytes:
        """Wait for the next part of the body; empty at its end. Raises ReplicaLost."""
        while not self._pieces:
            if self._complete:
                return b""
            await self._more()
        return self._take()

    async def rest(self, most: int) -> bytes:
        """Wait for the rest of the body. Raises ReplicaLost, also if it has more than ``most`` bytes."""
        pieces, size = list[bytes](), 0
        while True:
            if self._pieces:
                pieces.append(self._take())
                size += len(pieces[-1])
                if size > most:
                    raise ReplicaLost(f"its answer has more than {most} bytes")
            elif self._complete:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            else:
                await self._more()

    async def pass_to(self, sink: Callable[[bytes], bool]) -> bool:
        """Pass each part of the body to ``sink`` when it arrives, in the event loop's callback, so that no task must
        wake up.

        ``sink`` must not raise; it returns whether it accepts the next part, too. `pass_to` returns whether the body
        has ended. Raises ReplicaLost.
        """
        self._sink = sink
        try:
            self._pour()
            while self._sink is not None and not self._complete:
                await self._more()
        finally:
            self._sink = None
        return self._complete and not self._pieces

    def _pour(self) -> None:
        """Pass received data to the sink, and wake the waiting task if the sink gets no more."""
        assert self._sink is not None
        if self._pieces and not self._sink(self._take()):
            self._sink = None
        if self._sink is None or self._complete or self._error is not None:
            self._wake()

    def _take(self) -> bytes:
        data = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        self._buffered = 0
        if self._paused and not self.closed:
            self._paused = False
            self._transport.resume_reading()  # type: ignore[union-attr] # a connection that is not closed has one
        return data

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent on this connection."""
        open = self._error is None and self._transport is not None and not self._transport.is_closing()
        return open and self._complete and not self._pieces and self._stays

    @property
    def closed(self) -> bool:
        return self._error is not None or self._transport is None or self._transport.is_closing()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, reason: str) -> None:
        """Close the connection at once, and give the reason to the task that waits for the reply."""
        if self._error is None:
            self._error = ReplicaLost(reason)
        self.abort()
        self._wake()

    # ------------------------------------------------------------------------------------------------ asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the methods, but is no subclass

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        if not self._head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            return self.fail(f"its answer is not valid HTTP: {' '.join(str(error).split())[:100]}")
        if not self._head_complete and self._head_bytes > HEAD_BYTES:
            return self.fail(f"the head of its answer has more than {HEAD_BYTES} bytes")
        if self._buffered > BUFFERED_BYTES and self._transport is not None and not self._complete:
            self._paused = True
            self._transport.pause_reading()
        if self._sink is not None:
            self._pour()
        else:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._error is None and self._head_complete and not self._head.sized:
            self._complete = True  # such a body ends when the replica closes the connection
        if self._error is None:
            self._error = ReplicaLost("it closed the connection" if exc is None else "the connection was reset")
        self._wake()

    # ----------------------------------------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        if self._complete:  # the next client would get that reply
            self.fail("it sent an answer without a request")
            raise ReplicaLost("the parser is to read no more of it")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _SIZES:
            self._head.sized = True
        self._head.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head.status = self._parser.get_status_code()
        if self._head.status >= 200:
            self._head_complete = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if self._head.status < 200:
            self._head = Head(0)  # an interim reply; the final one follows
        elif self._head.sized or self._head.status in (204, 304):
            self._complete, self._stays = True, bool(self._parser.should_keep_alive())  # the parser knows that only now
            if self.on_end is not None:
                asyncio.get_running_loop().call_soon(self.on_end, self)  # it may be used again: not within the parser


class Pool:
    """The connections to one replica, kept for the next request. All calls belong to one event loop."""

    def __init__(self, address: Address, connect_seconds: float) -> None:
        self._address = address
        self._seconds = connect_seconds
        self._idle: list[Connection] = []
        self._age = 0
        """How often a new process has replaced the one at the address."""
        self._ending: dict[Connection, float] = {}
        """Connections whose reply has only its end left, and since when."""
        self._tls = ssl.create_default_context() if address.tls else None

    def kept(self) -> Connection | None:
        """Return a connection that has carried an earlier request, if there is one. The replica may be closing it."""
        while self._idle:
            if not (connection := self._idle.pop()).closed:
                return connection
        return None

    async def connect(self) -> Connection:
        """Return a new connection to the replica. Raises NoFiles, or ReplicaLost if the replica does not accept it."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._seconds):
                if self._address.socket:
                    _, connection = await loop.create_unix_connection(Connection, self._address.socket)
                else:
                    where = self._address.host, self._address.port
                    _, connection = await loop.create_connection(Connection, *where, ssl=self._tls)
        except TimeoutError:
            raise ReplicaLost(f"it took no connection within {self._seconds:g} seconds") from None
        except UnicodeError:
            raise ReplicaLost("its host's name can't be written as one") from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoFiles from None
            raise ReplicaLost(f"nobody answers there: {error.strerror or type(error).__name__}") from None
        connection.age = self._age
        return connection

    def give_back(self, connection: Connection, *, read: bool = False) -> None:
        """Keep a connection whose reply has ended. Close any other connection, unless all of its reply but the end has
        been ``read``."""
        connection.on_end = None
        self._ending.pop(connection, None)
        if connection.reusable and len(self._idle) < IDLE and connection.age == self._age:
            self._idle.append(connection)
        elif read and not connection.closed and len(self._ending) < IDLE:
            self._ending[connection] = time.monotonic()
            connection.on_end = self.give_back
        else:
            connection.abort()

    def renew(self) -> None:
        """Reuse no connection that was made before now."""
        self._age += 1
        while self._idle:
            self._idle.pop().abort()

    def close(self, *, unused: float = 0.0) -> None:
        """Close connections whose reply has not ended ``unused`` seconds after it was read. With 0, close all
        connections."""
        now = time.monotonic()
        for connection in [one for one, since in self._ending.items() if now - since >= unused]:
            del self._ending[connection]
            connection.abort()
        while self._idle and not unused:
            self._idle.pop().abort()
