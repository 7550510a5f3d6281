"""Sends the soak's requests to a server: some clients read slowly, and some leave before the answer ends."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Literal

from benchmarks.serving.endpoints import Endpoint, Json

Leave = Literal["close", "forget", "half"]

PATIENCE = 300.0
"""Seconds after which a request counts as lost."""
_JSON = {"Content-Type": "application/json"}
_SMALL = 2048


class Refused(ValueError):
    """An answer's status was not 200."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(f"{status} {told[:200]}")
        self.status = status


def call(address: str, method: str, path: str, body: Json | None = None) -> bytes:
    """Return the whole answer. Raises Refused, and OSError or HTTPException if there is none."""
    with closing(http.client.HTTPConnection(address, timeout=PATIENCE)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body), _JSON)
        return _good(connection.getresponse()).read()


def ask(address: str, endpoint: Endpoint, body: Json, *, pause: float = 0.0) -> str:
    """Return the answer's text, read with a pause before each line. Raises as `call` does."""
    with closing(_Small(address, timeout=PATIENCE) if pause else _connection(address)) as connection:
        connection.request("POST", endpoint.path, json.dumps(body), _JSON)
        return "".join(_texts(_good(connection.getresponse()), endpoint, pause))


def leave(address: str, endpoint: Endpoint, body: Json, how: Leave, patience: int) -> str:
    """Leave early: in the middle of the body, after it, or after ``patience`` pieces of the answer. Return the text
    read."""
    with closing(_connection(address)) as connection:
        sent = json.dumps(body).encode()
        if how == "half":
            connection.putrequest("POST", endpoint.path)
            for name, value in {**_JSON, "Content-Length": str(len(sent))}.items():
                connection.putheader(name, value)
            connection.endheaders(sent[: len(sent) // 2])
            return ""
        connection.request("POST", endpoint.path, sent, _JSON)
        if how == "forget":
            return ""
        pieces = _texts(_good(connection.getresponse()), endpoint, 0.0)
        return "".join(piece for _, piece in zip(range(patience), pieces, strict=False))


def _texts(reply: http.client.HTTPResponse, endpoint: Endpoint, pause: float) -> Iterator[str]:
    while line := reply.readline():
        time.sleep(pause)
        told = line.decode().strip().removeprefix("data: ")
        if told.startswith("{"):
            yield endpoint.text(json.loads(told))


def _good(reply: http.client.HTTPResponse) -> http.client.HTTPResponse:
    if reply.status != 200:
        raise Refused(reply.status, reply.read().decode())
    return reply


def _connection(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(address, timeout=PATIENCE)


class _Small(http.client.HTTPConnection):
    """A connection with a small receive buffer, so that little is read at a time."""

    def connect(self) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        self.sock.settimeout(PATIENCE)
        self.sock.connect((self.host, self.port))
