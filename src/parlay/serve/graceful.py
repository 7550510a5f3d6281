"""Runs an application under uvicorn until a signal shuts it down gracefully."""

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

_LAST_WORDS = 5  # seconds for error answers to reach their clients
_QUERY_VALUE = re.compile(r"(?<==)[^&]+")


def is_access_of_note(record: logging.LogRecord) -> bool:
    """Filter the access log: mask values in URLs, which may be keys, and log probes only at level debug."""
    if isinstance(record.args, tuple):
        record.args = tuple(_without_values(part) if isinstance(part, str) else part for part in record.args)
        if any(str(part).partition("?")[0] in PROBES for part in record.args):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


def _without_values(path: str) -> str:
    path, mark, query = path.partition("?")
    return path + mark + (_QUERY_VALUE.sub("***", query) if "=" in query else "***" if query else "")


class ShutDown(Protocol):
    """Refuses new requests, waits for those under way (or ends them ``at_once``), and returns when none is left."""

    def __call__(self, *, at_once: bool = False) -> Coroutine[Any, Any, None]: ...


class GracefulServer(uvicorn.Server):
    """uvicorn that keeps listening while it drains, so that late clients are told why they are refused.

    The first SIGINT, SIGTERM or SIGHUP lets running requests finish within the settings' limit; new ones are told to
    come back later. A second signal ends them now with an error. A third one exits at once. Several SIGHUPs count as
    one, as a closing terminal sends several. ``ready`` is called when requests are accepted.
    """

    def __init__(self, app: ASGIApp, ready: Callable[[], None], shut_down: ShutDown, *, access_log: bool) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,  # the caller sets up logging
            access_log=access_log,
            lifespan="on",
            timeout_graceful_shutdown=_LAST_WORDS,
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
        gc.freeze()  # loaded objects stay, and looking through them at each collection would delay requests
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, but do not raise them again afterwards, which would print a traceback at
        exit."""
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
        """Whether to log a record: not the tracebacks of answers cut off by the shutdown, which uvicorn counts
        anyway."""
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
