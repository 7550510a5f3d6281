"""Threads for long work: few, so that the event loop gets its turn, and shared fairly between owners."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from parlay.serve.errors import too_many
from parlay.serve.guard.auth import tenant

T = TypeVar("T")

LIGHT_BYTES = 32 * 1024
"""Bodies up to this many bytes are light work."""
_LIGHT_THREADS = 4
_HEAVY_THREADS = 2
_HEAVY_WAITING = 64
"""Limit per owner, so that one owner's requests do not cause another's to be refused."""


class FairQueue:
    """Admits ``places`` at once; waiting owners take turns, however many requests each has."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def waiting(self, owner: str) -> int:
        """How many requests of the owner wait."""
        return len(self._waiting.get(owner, ()))

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        await self._enter(owner)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, owner: str) -> None:
        if self._free:
            self._free -= 1
            return
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(called)
        try:
            await called
        except asyncio.CancelledError:
            if called.done() and not called.cancelled():
                self._leave()  # it was admitted at the last moment
            raise

    def _leave(self) -> None:
        """Give the place to the owner whose last turn was longest ago."""
        while self._waiting:
            owner, calls = self._waiting.popitem(last=False)
            called = calls.popleft()
            if calls:
                self._waiting[owner] = calls
            if not called.done():
                called.set_result(None)
                return
        self._free += 1


class Workers:
    """Runs functions in threads: light work at once, heavy work in its owner's turn."""

    def __init__(self, retry_after: int) -> None:
        self._retry_after = retry_after
        self._turns = FairQueue(_HEAVY_THREADS)
        self._readings = FairQueue(1)
        self._light = ThreadPoolExecutor(_LIGHT_THREADS, "parlay-light")
        self._heavy = ThreadPoolExecutor(_HEAVY_THREADS, "parlay-heavy")

    async def call(self, request: Request, function: Callable[[], T], *, heavy: bool = False) -> T:
        """Run the function in a thread, and return or raise what it does.

        A large body always makes its work heavy. Raises ApiError if too many requests of the owner wait.
        """
        loop = asyncio.get_running_loop()
        if not heavy and request.state.body_bytes <= LIGHT_BYTES:
            return await loop.run_in_executor(self._light, function)
        owner = tenant(request)
        if self._turns.waiting(owner) >= _HEAVY_WAITING:
            raise too_many(self._retry_after, "too many large requests are waiting: try again later")
        async with self._turns.place(owner):
            return await loop.run_in_executor(self._heavy, function)

    def reading(self, request: Request) -> AbstractAsyncContextManager[None]:
        """Wait for the owner's turn to run a forward between two steps, as each such forward delays decoding
        requests."""
        return self._readings.place(tenant(request))
