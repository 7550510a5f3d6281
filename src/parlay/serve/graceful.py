"""Runs an application under uvicorn until a signal ends it, gently."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import HANDLED_SIGNALS

from parlay.serve.guard.connection import Connection
from parlay.serve.middleware import PROBES

_LAST_WORDS = 5  # seconds for answers that were cut off to reach their clients
_NEVER = 1 << 30  # seconds
_QUERY_VALUE = re.compile(r"(?<==)[^&]+")


def is_access_of_note(record: logging.LogRecord) -> bool:
    """Keep what a client wrote into a URL, which may be a key, out of the access log; and probes, unless it debugs."""
    if isinstance(record.args, tuple):
        record.args = tuple(_without_values(part) if isinstance(part, str) else part for part in record.args)
        if any(str(part).partition("?")[0] in PROBES for part in record.args):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


def _without_values(path: str) -> str:
    path, mark, query = path.partition("?")
    return path + mark + (_QUERY_VALUE.sub("***", query) if "=" in query else "***" if query else "")


class ShutDown(Protocol):
    """Takes no new requests, waits for those under way or ends them ``at_once``, and returns when none is left."""

    def __call__(self, *, at_once: bool = False) -> Coroutine[Any, Any, None]: ...


class GracefulServer(uvicorn.Server):
    """uvicorn, but it keeps listening while it drains, so that latecomers hear why they are turned away.

    The first SIGINT, SIGTERM or SIGHUP lets running requests finish, as long as the settings allow, while new ones are
    told to come back later. A second one ends them now, with an error that says so. A third one waits for nobody.
    Several SIGHUPs are one, for a terminal that closes sends them. ``ready`` is called when requests are taken.
    """

    def __init__(self, app: ASGIApp, ready: Callable[[], None], shut_down: ShutDown, *, access_log: bool) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,  # whoever runs it sets up logging
            access_log=access_log,
            lifespan="on",
            timeout_graceful_shutdown=_LAST_WORDS,
            timeout_keep_alive=_NEVER,  # the connection itself ends the wait for the next request
            server_header=False,
            ws="none",
            http=Connection,
        )
        super().__init__(config)
        self._shut_down = shut_down
        self._ready = ready
        self._signals = 0
        logging.getLogger("uvicorn.error").addFilter(self._is_news)
        logging.getLogger("uvicorn.access").addFilter(is_access_of_note)
        self._draining: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is loaded stays: to look through it again and again would hold up every request
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals as uvicorn does, but without effect afterwards: at a process's end one adds a traceback."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hang_up = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else ()  # nohup ignores it
        for each in (*HANDLED_SIGNALS, *hang_up):
            signal.signal(each, self.handle_exit)
        try:
            yield
        finally:
            for each in (*HANDLED_SIGNALS, signal.SIGHUP):
                signal.signal(each, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += sig != signal.SIGHUP or not self._signals
        if self._signals > 2:
            self.should_exit = self.force_exit = True

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Not the tracebacks of answers that were cut off because the server ends: uvicorn says how many these are."""
        cut_off = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
        return not self.force_exit and not cut_off

    async def on_tick(self, counter: int) -> bool:
        if self._signals and self._draining is None:
            self._draining = asyncio.create_task(self._shut_down())
        if self._signals > 1 and self._cutting is None:
            self._cutting = asyncio.create_task(self._shut_down(at_once=True))
        if any(task is not None and task.done() for task in (self._draining, self._cutting)):
            self.should_exit = True
        return await super().on_tick(counter)
