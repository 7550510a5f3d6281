"""Replicas for a gateway: a server with the test model whose connection can be cut, hung or slowed, and fakes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from parlay import LLM
from parlay.aio import AsyncLLM
from parlay.gateway.app import Gateway, create_gateway
from parlay.gateway.settings import Address, GatewaySettings
from parlay.serve.app import create_app
from parlay.serve.settings import Settings

DEADLINE = 90
"""Seconds after which a waiting test fails."""
IDENTITY = b'{"build":"b","models":"m","kernels":"k"}'
READY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(IDENTITY), IDENTITY)


@pytest.fixture(scope="session")
def server() -> Iterator[int]:
    """The port of a server with the test model."""
    engine = AsyncLLM.load(lambda: LLM("parlay-mini", router_memory="off"))
    app = create_app({"parlay-mini": engine}, Settings(drain_seconds=0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        yield bound.getsockname()[1]
        running.should_exit = True
        thread.join(DEADLINE)
    asyncio.run(engine.close(0))


class Line:
    """A replica that passes bytes on to the server at a port. It lets ``most`` bytes of a POST's answer through, or
    ``events`` events of a stream. Its identity is the same as each `Fake`'s.

    After that it is ``dead`` (connections are reset) or, if it ``hangs``, silent on all connections. ``pause``: seconds
    between two pieces.
    """

    def __init__(self, port: int) -> None:
        self.to = port
        self.most: int | None = None
        self.events: int | None = None
        self.hangs = self.dead = self.silent = False
        self.pause = 0.0
        self.posts = 0
        self.posting = 0
        """Connections that carried a POST."""
        self.on_cut: Callable[[], None] = lambda: None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            await self._talk(reader, writer)
        writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.dead:
            return
        if (first := await reader.read(65536)).startswith(b"GET /identity") and not self.silent:
            writer.write(READY)
            return await writer.drain()
        there, back = await asyncio.open_connection("127.0.0.1", self.to)
        posting: list[bool] = []
        pumps = [
            asyncio.create_task(each)
            for each in (self._up(first, reader, back, posting), self._down(there, writer, posting))
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            back.transport.abort()

    async def _up(
        self, data: bytes, reader: asyncio.StreamReader, back: asyncio.StreamWriter, posting: list[bool]
    ) -> None:
        while data:
            if self.silent:
                await asyncio.Event().wait()
            if data.startswith(b"POST"):
                self.posting += not posting
                posting.append(True)
                self.posts += 1
            back.write(data)
            data = await reader.read(65536)

    async def _down(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, posting: list[bool]) -> None:
        sent = 0
        while data := await there.read(65536):
            await asyncio.sleep(self.pause)
            if posting and (let := self._let(data, sent)) < len(data):
                writer.write(data[:let])
                await writer.drain()
                self.silent, self.dead = self.hangs, not self.hangs
                self.on_cut()
            if self.silent:
                await asyncio.Event().wait()
            if self.dead:
                await asyncio.sleep(0.02)  # lets the written bytes arrive first
                return
            sent += len(data)
            writer.write(data)

    def _let(self, data: bytes, sent: int) -> int:
        """How many bytes of these it passes on, after those that were sent."""
        if self.events is None:
            return len(data) if self.most is None else max(self.most - sent, 0)
        end = b"\n\n"
        whole = data.split(end)[: self.events]
        self.events -= data.count(end)
        return len(data) if self.events >= 0 else len(end.join(whole)) + len(end) * bool(whole)


class Fake:
    """A replica that answers every POST with the same bytes. It is ready while ``awake``, and tells its identity once
    ``hashed``."""

    def __init__(self, answer: bytes, ready: bytes = READY) -> None:
        self._answer = answer
        self._ready = ready
        self.posts: list[bytes] = []
        self.looks = 0
        """How often the gateway asked whether it is ready."""
        self.awake, self.hashed = asyncio.Event(), asyncio.Event()
        self.awake.set()
        self.hashed.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            if data := await reader.read(65536):
                if data.startswith(b"POST"):
                    self.posts.append(data)
                if data.startswith(b"GET /ready"):
                    self.looks += 1
                    await self.awake.wait()
                if data.startswith(b"GET /identity"):
                    await self.hashed.wait()
                writer.write(self.answer_to(data))
                await writer.drain()
        writer.close()

    def answer_to(self, data: bytes) -> bytes:
        return self._answer if data.startswith(b"POST") else self._ready


RELAY = """
import asyncio, os, signal, sys

to, most = map(int, sys.argv[1:])

async def passed(reader, writer, answers):
    global most
    while data := await reader.read(4096):
        if not answers:
            asked.add(writer) if data.startswith(b"POST") else None
        elif most >= 0 and back_of.get(reader) in asked:
            writer.write(data[:most])
            data, most = data[most:], most - len(data)
            if most < 0:
                await asyncio.sleep(0.05)  # what was written goes out first
                os.kill(os.getpid(), signal.SIGSTOP)
        writer.write(data)
    writer.close()

asked, back_of = set(), {}

async def handle(reader, writer):
    there, back = await asyncio.open_connection("127.0.0.1", to)
    back_of[there] = back
    await asyncio.gather(passed(reader, back, False), passed(there, writer, True), return_exceptions=True)

async def main():
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


class Relay:
    """A replica in a process of its own, which passes bytes on to a server until a signal stops it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.pid = process.pid
        self.address = Address("127.0.0.1", int(process.stdout.readline()))

    @property
    def stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def relay(port: int, most: int = -1) -> Iterator[Relay]:
    """Start a relay to the server at a port. It stops itself (SIGSTOP) once, after ``most`` bytes of a POST's
    answer."""
    command = [sys.executable, "-I", "-S", "-c", RELAY, str(port), str(most)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Relay(process)
        finally:
            process.kill()


Handler = Line | Fake


@asynccontextmanager
async def standing(
    replicas: Sequence[Handler | Relay], *, ready: int | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Gateway]]:
    """Start a gateway in front of the replicas, in this event loop, and yield a client and the gateway."""
    own = [each for each in replicas if not isinstance(each, Relay)]
    servers = [await asyncio.start_server(each.handle, "127.0.0.1", 0) for each in own]
    addresses = [Address("127.0.0.1", one.sockets[0].getsockname()[1]) for one in servers]
    addresses += [each.address for each in replicas if isinstance(each, Relay)]
    usual = {"probe_seconds": 0.05, "wait_seconds": 60.0, "health_seconds": 60.0, "connect_seconds": 60.0}
    gateway = create_gateway(addresses, GatewaySettings(**{**usual, **settings}))
    gateway.fleet.start()
    transport = httpx.ASGITransport(gateway)
    try:
        async with (
            asyncio.timeout(DEADLINE),
            httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
        ):
            while len(gateway.fleet.ready) < (len(replicas) if ready is None else ready):
                await asyncio.sleep(0.01)
            yield client, gateway
    finally:
        await gateway.fleet.close()
        for one in servers:
            one.close()


@pytest.fixture
def behind() -> Callable[..., None]:
    """``behind(replicas, test, **settings)`` runs ``test(client, gateway)`` with a gateway in front of replicas."""

    def run(
        replicas: Sequence[Handler | Relay],
        test: Callable[[httpx.AsyncClient, Gateway], Awaitable[None]],
        **settings: Any,
    ) -> None:
        async def main() -> None:
            async with standing(replicas, **settings) as (client, gateway):
                await test(client, gateway)

        asyncio.run(main())

    return run
