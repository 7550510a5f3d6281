"""One client's connection: its headers are bounded in size and in the time that they take to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from parlay.serve.errors import ApiError

HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 15.0


class Connection(HttpToolsProtocol):
    """Closes a connection whose next headers are too large, or do not arrive; uvicorn waits for them for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._size = 0
        self._due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._due is not None:
            self._size += len(data)
            if self._size > HEADER_BYTES:
                self._refuse(431, f"the headers are larger than {HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def _expect_headers(self) -> None:
        self._stop_waiting()
        self._due = self.loop.call_later(HEADER_SECONDS, self._refuse, 408, "the headers took too long to arrive")

    def _stop_waiting(self) -> None:
        self._size = 0
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error and close. A client that has sent nothing gets no answer."""
        silent = self._size == 0 and status == 408
        self._stop_waiting()
        if not silent:
            body = ApiError(status, message).response("").body
            head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + bytes(body))
        self.transport.close()
