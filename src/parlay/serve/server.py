"""Runs an application of `create_app` under uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI

from parlay.serve.app import shut_down
from parlay.serve.graceful import GracefulServer


class Server(GracefulServer):
    """Serves an application of `create_app`."""

    def __init__(self, app: FastAPI, ready: Callable[[], None], *, access_log: bool) -> None:
        super().__init__(app, ready, partial(shut_down, app), access_log=access_log)
        self._document = app.openapi

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._document()  # made now, as the first request for it would hold up all others
        await super().startup(sockets)
