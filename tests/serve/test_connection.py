"""Real sockets against a real server: every byte and every wait of a connection has a bound."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from parlay.serve.guard import connection
from parlay.serve.server import Server

Address = tuple[str, int]
Start = Callable[..., Address]
DEADLINE = 300.0
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
BODY = b'{"prompt": "x"}'
LAST = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)


@pytest.fixture
def start(make_app: Callable[..., FastAPI]) -> Iterator[Start]:
    """``start(**settings)``: a server on a free port, run as `parlay serve` runs it."""
    running: list[tuple[Server, threading.Thread]] = []

    def begin(gone: threading.Event | None = None, **settings: object) -> Address:
        app, ready = make_app(**settings), threading.Event()
        _add_waiting(app, gone or threading.Event())
        listener = socket.create_server(("127.0.0.1", 0))
        server = Server(app, ready.set, access_log=False)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert ready.wait(DEADLINE)
        running.append((server, thread))
        address: Address = listener.getsockname()
        return address

    yield begin
    for server, thread in running:
        server.should_exit = True
        thread.join(DEADLINE)


def _add_waiting(app: FastAPI, gone: threading.Event) -> None:
    """An operation that answers after ``x-seconds``, and sets ``gone`` where its client leaves meanwhile, and one that
    writes parts of its answer for so long."""

    @app.post("/late")
    async def late(request: Request) -> str:
        async def leaving() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone.set()

        with suppress(TimeoutError):
            await asyncio.wait_for(leaving(), float(request.headers["x-seconds"]))
        return "done"

    @app.post("/parts")
    async def parts(request: Request) -> StreamingResponse:
        async def lines() -> AsyncIterator[bytes]:
            for _ in range(int(float(request.headers["x-seconds"]) / 0.1)):
                yield b"part\n"
                await asyncio.sleep(0.1)

        return StreamingResponse(lines())


def _asking(path: str, seconds: float) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Seconds: {seconds}\r\nContent-Length: 0\r\n\r\n".encode()


def _connect(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=DEADLINE)


def _reply(client: socket.socket) -> bytes:
    """All that comes until the server closes; a reset would raise."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def _flood(client: socket.socket, piece: bytes, most: int = 64_000_000) -> int:
    """Send until the server has closed; the number of bytes that it took."""
    sent = 0
    with suppress(BrokenPipeError, ConnectionResetError):
        while sent < most:
            client.sendall(piece)
            sent += len(piece)
    return sent


def _closes(client: socket.socket, sent: bytes) -> bool:
    """Whether the server closes while a few bytes come again and again."""
    until = time.monotonic() + DEADLINE
    try:
        while time.monotonic() < until:
            client.sendall(sent)
            time.sleep(0.05)
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


def _status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


@pytest.mark.parametrize("key", ["", "secret"], ids=["no key", "key missing"])
@pytest.mark.parametrize("endless", [b"Xy:a\r\n" * 3000, b"a" * 16_000], ids=["trailers", "one value"])
def test_trailers_without_end_are_cut_off(start: Start, key: str, endless: bytes) -> None:
    address = start(keys=(key,) if key else ())
    with _connect(address) as client:
        client.sendall(CHUNKED + b"\r\n" + LAST + b"Xy:")
        took = _flood(client, endless)
    assert took < 2 * connection.DROPPED_BYTES + 8_000_000  # what kernel and server drop, at most
    with _connect(address) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert _status(_reply(client)) == 200


@pytest.mark.parametrize(
    "framed", [b"1;" + b"e" * 100_000 + b"\r\n{", b"00000000000000000001" * 5000], ids=["extension", "zeros"]
)
def test_what_frames_a_body_is_bounded(start: Start, framed: bytes) -> None:
    with _connect(start()) as client:
        client.sendall(CHUNKED + b"\r\n" + framed)
        reply = _reply(client)
    assert _status(reply) in (400, 431)
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_a_body_in_chunks_of_one_byte_and_short_trailers_are_read(start: Start) -> None:
    body = b'{"prompt": "' + b"x" * 30_000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with _connect(start()) as client:
        client.sendall(CHUNKED + b"Connection: close\r\n\r\n" + chunks + b"0\r\nX-Check: 1\r\n\r\n")
        assert _status(_reply(client)) == 200


def test_a_head_above_the_bound_is_refused_even_in_one_segment(start: Start) -> None:
    with _connect(start()) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000 + b"\r\n\r\n")
        reply = _reply(client)
        assert _status(reply) == 431
        assert b"\r\nx-request-id: req_" in reply


@pytest.mark.parametrize(("settings", "status"), [({"max_body_bytes": 1000}, 413), ({"keys": ("secret",)}, 401)])
def test_an_answer_before_the_end_of_the_body_can_be_read_and_closes(
    start: Start, settings: dict[str, object], status: int
) -> None:
    """The client sends all before it reads, as `http.client` does, and is not reset meanwhile."""
    client = http.client.HTTPConnection(*start(**settings), timeout=DEADLINE)
    client.request("POST", "/v1/completions", b'{"prompt": "' + b"x" * 8_000_000 + b'"}')
    reply = client.getresponse()
    assert (reply.status, reply.headers["Connection"]) == (status, "close")
    assert json.loads(reply.read())["error"]["message"]


@pytest.mark.parametrize("sent", [b"\r\n", b"GET /health HTTP/1.1\r\nX: ", b"x"], ids=["newlines", "a head", "rest"])
def test_no_byte_extends_a_wait(start: Start, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(connection, "DROPPED_SECONDS", 0.5)
    address = start(keys=("secret",))
    with _connect(address) as client:
        if sent == b"x":
            client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert _closes(client, sent)


def test_where_connections_are_used_up_a_new_client_still_gets_a_place(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "most_connections", lambda: 20)
    address = start(keys=("secret",))
    half = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
    begun = [half, half + b"\r\n", half + b"Authorization: Bearer secret\r\n\r\n", b""]
    clients = [_connect(address) for _ in range(60)]
    try:
        for place, client in enumerate(clients):
            with suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(begun[place % len(begun)])
        valid = http.client.HTTPConnection(*address, timeout=DEADLINE)
        valid.request("POST", "/tokenize", BODY, {"Authorization": "Bearer secret", "Content-Type": "application/json"})
        assert valid.getresponse().status == 200
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_half_closes_gets_its_answer(start: Start, version: bytes) -> None:
    with _connect(start()) as client:
        client.sendall(b"POST /late HTTP/%b\r\nHost: x\r\nX-Seconds: 0.7\r\nContent-Length: 0\r\n\r\n" % version)
        client.shutdown(socket.SHUT_WR)
        reply = _reply(client)
    assert b" 200 OK" in reply
    assert b'"done"' in reply


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "second"])
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n" + BODY, "the body ended too early"),
        (CHUNKED + b"\r\n" + LAST[:-5], "the body ended too early"),
        (CHUNKED, "the request ended within its headers"),
        (b"", ""),
    ],
    ids=["length", "chunks", "head", "nothing"],
)
def test_a_client_that_half_closes_within_its_request_is_told_so(
    start: Start, before: bytes, sent: bytes, said: str
) -> None:
    """Otherwise a wrong Content-Length looks like a server that is down."""
    with _connect(start()) as client:
        if before:
            client.sendall(before)
            assert client.recv(65536).endswith(b'{"status":"ok"}')
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        reply = _reply(client)
    assert reply.startswith(b"HTTP/1.1 400 ") == bool(said)
    assert said.encode() in reply


@pytest.mark.parametrize("requests", [1, 2])
def test_a_client_that_leaves_is_noticed(start: Start, requests: int) -> None:
    """Its socket says the same as one that has half-closed; a reset tells them apart. Nor does it matter that another
    request waits behind the one being answered."""
    gone = threading.Event()
    with _connect(start(gone)) as client:
        client.sendall(_asking("/late", 60) * requests)
    assert gone.wait(DEADLINE)


def test_a_client_that_leaves_while_another_request_waits_is_no_error(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer under way is not written to its closed connection."""
    with _connect(start()) as client:
        client.sendall(_asking("/parts", 2) * 2)
        assert b"part" in client.recv(65536) + client.recv(65536)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
    time.sleep(0.5)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_nothing_is_written_into_an_answer_under_way(start: Start) -> None:
    """Neither a test whether the client is still there, nor an error of the request behind it."""
    address = start()
    with _connect(address) as client:
        client.sendall(_asking("/parts", 1.5) + _asking("/late", 0.1))
        client.shutdown(socket.SHUT_WR)
        first, second = _reply(client).split(b"\r\n0\r\n\r\n")
    assert first.count(b"part") == 15
    assert b" 100 " not in first[first.index(b" 200 OK") :]
    assert second.endswith(b'"done"')
    with _connect(address) as client, suppress(ConnectionResetError):
        client.sendall(_asking("/parts", 1.5) + CHUNKED + b"\r\nno size\r\n")
        for piece in iter(lambda: client.recv(65536), b""):
            assert b" 400 " not in piece


def test_requests_behind_each_other_are_answered_in_order_and_bounded(start: Start) -> None:
    address = start()
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with _connect(address) as client:
        client.sendall(one * 3 + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert _reply(client).count(b'{"status":"ok"}') == 4
    with _connect(address) as client, suppress(ConnectionResetError, BrokenPipeError):
        client.sendall(one * 5000)
        assert _reply(client).count(b'{"status":"ok"}') < 5000


class _Written(asyncio.Transport):
    """Notes each write, which is a system call."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "as uvloop says, the handler is closed"
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def resume_reading(self) -> None: ...


@pytest.mark.parametrize(("pause", "writes"), [(False, 3), (True, 4)])
@pytest.mark.parametrize("stays", [True, False])
def test_a_head_waits_for_the_body_of_its_turn_and_no_longer(pause: bool, writes: int, stays: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        if pause:
            await asyncio.sleep(0.01)
        for part in (b"a", b"b", b"c"):
            await send({"type": "http.response.body", "body": part, "more_body": part != b"c"})

    async def answered() -> _Written:
        transport = _Written()
        config = uvicorn.Config(app, http=connection.Connection, lifespan="off")
        own = connection.Connection(config=config, server_state=ServerState(), app_state={})
        own.connection_made(transport)
        own.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n" + (b"" if stays else b"Connection: close\r\n") + b"\r\n")
        while not own.cycle.response_complete:
            await asyncio.sleep(0.01)
        assert transport.closed is not stays
        own.connection_lost(None)
        return transport

    found = asyncio.run(answered()).writes
    assert len(found) == writes
    head, _, body = b"".join(found).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert body == b"abc"


def test_a_client_that_leaves_in_the_turn_in_which_its_answer_begins_is_no_error() -> None:
    """The head that waits for the body is dropped. Writing it would log a traceback for each such client."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        own.connection_lost(None)
        transport.close()

    async def errors() -> list[object]:
        found: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: found.append(context["message"]))
        own.connection_made(transport)
        own.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.1)
        return found

    async def make() -> connection.Connection:
        config = uvicorn.Config(app, http=connection.Connection, lifespan="off")
        return connection.Connection(config=config, server_state=ServerState(), app_state={})

    transport = _Written()
    with asyncio.Runner() as runner:
        own = runner.run(make())
        assert runner.run(errors()) == []
    assert transport.writes == []


def test_a_kept_connection_stays_longer_than_clients_keep_it() -> None:
    """Else it closes just when some client sends its next request, which is lost. uvicorn's own limit is 5 seconds."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def is_closed() -> bool:
        transport = _Written()
        config = uvicorn.Config(app, http=connection.Connection, lifespan="off", timeout_keep_alive=0)
        own = connection.Connection(config=config, server_state=ServerState(), app_state={})
        own.connection_made(transport)
        own.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while not own.cycle.response_complete:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        closed = transport.closed
        own.connection_lost(None)
        return closed

    assert not asyncio.run(is_closed())
    assert connection.HEADER_SECONDS > 15  # aiohttp's
