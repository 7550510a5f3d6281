"""How much of a body may come, and how much it may hold."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parlay.serve.errors import ApiError, too_many
from parlay.serve.guard.workers import LIGHT_BYTES
from parlay.serve.settings import PROMPT_LOG, Settings

_LARGEST = 8
_PAUSE = 0.005
"""Seconds for others between two large bodies, which are read one after the other."""
prompt_log = logging.getLogger(PROMPT_LOG)
MOST_CONTAINERS = 2**15
MOST_STRINGS = 2**15
MOST_VALUES = 2**18
"""Most lists and objects of a body, strings with names of fields, and values in all. To read so many, and to look
whether they are what they should be, takes some 50 ms, in which the server answers nobody. What merely looks like
them inside a text counts too: only bytes are looked at."""


@dataclass(slots=True)
class BodyBytes:
    """Counts the bytes of bodies under way, ``most`` in all; one owner among several has half. Lives in one event loop.

    A request's texts and ids take memory as long as it runs, some ten times its body.
    """

    most: int
    _used: Counter[str] = field(default_factory=Counter)

    def take(self, owner: str, size: int) -> None:
        """Raises ApiError where there is no room."""
        share = self.most // 2 if owner else self.most
        if self._used.total() + size > self.most or self._used[owner] + size > share:
            raise too_many(1, f"large requests of {share} bytes are under way, which is all at once: try again later")
        self._used[owner] += size

    def give_back(self, owner: str, size: int) -> None:
        self._used[owner] -= size
        if not self._used[owner]:
            del self._used[owner]


class BodyLimit:
    """ASGI middleware that reads the whole body, counting it, before the application runs.

    Bodies of more than `LIGHT_BYTES` have together `_LARGEST` times the room of the largest.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._limit = settings.max_body_bytes
        self._timeout = settings.body_timeout
        self._log_prompts = settings.log_prompts
        self._large = asyncio.Lock()
        self._bytes = BodyBytes(_LARGEST * settings.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        taken: list[int] = []
        owner = scope.setdefault("state", {}).get("tenant", "")

        def take(size: int) -> None:
            self._bytes.take(owner, size)
            taken.append(size)

        try:
            await self._answer(scope, receive, send, take)
        finally:
            self._bytes.give_back(owner, sum(taken))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, take: Callable[[int], None]) -> None:
        try:
            self._check_announced(Headers(scope=scope).get("content-length", ""))
            async with asyncio.timeout(self._timeout):
                body = await self._read(receive, take)
            check_readable(body or b"")
        except ApiError as error:
            return await error.response(scope["path"])(scope, receive, send)
        except TimeoutError:
            late = ApiError(408, f"the body took more than {self._timeout:g} seconds to arrive", code="timeout")
            return await late.response(scope["path"])(scope, receive, send)
        if body is None:
            return  # the client is gone
        if len(body) > LIGHT_BYTES:
            async with self._large:
                await asyncio.sleep(_PAUSE)
        if self._log_prompts and body:
            prompt_log.info("%s %s", scope["path"], body.decode(errors="backslashreplace"))
        scope["state"]["body_bytes"] = len(body)
        await self._app(scope, _replay(body, receive), send)

    def _check_announced(self, length: str) -> None:
        if length.isdecimal() and int(length[:20]) > self._limit:
            raise self._too_large()

    async def _read(self, receive: Receive, take: Callable[[int], None]) -> bytes | None:
        """None when the client leaves first. Raises ApiError at the first byte too many."""
        body, counted = bytearray(), 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._limit:
                raise self._too_large()
            if len(body) > LIGHT_BYTES:
                take(len(body) - counted)
                counted = len(body)
            more = message.get("more_body", False)
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limit} bytes, which is all this server takes")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one message; after it, what the client does next."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def check_readable(body: bytes) -> None:
    """Raises ApiError for a body that is too large to be parsed."""
    containers = body.count(b"[") + body.count(b"{")
    _check(containers, MOST_CONTAINERS, "lists and objects")
    _check(containers + body.count(b","), MOST_VALUES, "values")
    _check((body.count(b'"') - body.count(b'\\"') + 1) // 2, MOST_STRINGS, "strings")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        message = f"the body can't be read: it holds some {count} {what}, and the limit is {most}: send less"
        raise ApiError(400, message)
