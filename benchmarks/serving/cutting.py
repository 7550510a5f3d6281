"""Cuts connections to a server at random bytes of its answers, as a gateway sees it when it loses a replica."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class CuttingLine:
    """Passes bytes on to a server. It cuts about every second answer to a POST within its first ``most`` bytes."""

    def __init__(self, host: str, port: int, most: int) -> None:
        self._to = (host, port)
        self._most = most
        self._random = random.Random(0)
        self.cuts = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one connection."""
        left: list[float] = [float("inf")]
        there, back = await asyncio.open_connection(*self._to)
        pumps = [
            asyncio.create_task(self._requests(reader, back, left)),
            asyncio.create_task(self._answers(there, writer, left)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for side in (writer, back):
            side.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter, left: list[float]) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if data.startswith(b"POST"):
                    left[0] = self._random.randrange(self._most) if self._random.random() < 0.5 else float("inf")
                back.write(data)

    async def _answers(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[float]) -> None:
        with suppress(ConnectionError):
            while data := await there.read(65536):
                if len(data) >= left[0]:
                    writer.write(data[: int(left[0])])
                    self.cuts += 1
                    await asyncio.sleep(0.001)  # the bytes written are sent before the cut
                    return
                left[0] -= len(data)
                writer.write(data)


@asynccontextmanager
async def cut_lines(host: str, port: int, count: int, most: int) -> AsyncIterator[tuple[list[CuttingLine], list[str]]]:
    """Open several cutting connections to one server, and yield them with their addresses."""
    lines = [CuttingLine(host, port, most) for _ in range(count)]
    servers = [await asyncio.start_server(line.handle, "127.0.0.1", 0) for line in lines]
    try:
        yield lines, [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    finally:
        for server in servers:
            server.close()
