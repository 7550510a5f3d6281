"""Runs a replica that answers at once with prepared answers, so that only the gateway takes time.

python -m benchmarks.serving.canned    # prints its address
"""

from __future__ import annotations

import asyncio
import json
from typing import cast

_ID = b'{"build":"b","models":"m","kernels":"k"}'
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nparlay-resume: abc cmpl-1 1\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_BETWEEN = 0.001
"""Seconds between two parts of a stream."""


class Canned(asyncio.Protocol):
    """Serves one connection. A body with `stream` gets as many events as its `max_tokens` says."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._came = b""

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, found, body = self._came.partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0)
        if not found or len(body) < length:
            return
        self._came = b""
        asked = json.loads(body) if body else {}
        if asked.get("stream"):
            self._stream(asked["max_tokens"])
        else:
            answer = _reply(asked.get("max_tokens", 0)) if asked else _ID
            self._transport.write(_JSON % (len(answer), answer))

    def _stream(self, events: int) -> None:
        parts = [b": tokens 0 %d\ndata: %s\n\n" % (number, _reply(1)) for number in range(events)]
        self._transport.write(_STREAM + _chunk(b": opened\n\n"))
        ends = [*parts[:-1], parts[-1] + b": done\ndata: [DONE]\n\n"]
        self._write([_chunk(part) for part in ends])

    def _write(self, chunks: list[bytes]) -> None:
        first, *others = chunks
        self._transport.write(first if others else first + b"0\r\n\r\n")
        if others:
            asyncio.get_running_loop().call_later(_BETWEEN, self._write, others)


def _reply(tokens: int) -> bytes:
    choice = {"index": 0, "text": " sea" * tokens, "logprobs": None, "finish_reason": None}
    shared = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "parlay-mini"}
    return json.dumps({**shared, "choices": [choice]}, separators=(",", ":")).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def main() -> None:
    """Serve until the process ends."""
    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
