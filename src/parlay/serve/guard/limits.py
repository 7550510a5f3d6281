"""How much a client may ask for: requests at once, bytes of a body, tokens a minute, urgency."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parlay.serve.errors import ApiError, too_many, unavailable
from parlay.serve.guard.auth import digest
from parlay.serve.guard.reading import check_readable
from parlay.serve.guard.workers import LIGHT_BYTES
from parlay.serve.settings import PROMPT_LOG, KeyLimits, Settings


@dataclass(slots=True)
class Quotas:
    """Counts by key. ``own`` are limits of single keys, ``default`` those of all others. Lives in one event loop."""

    default: KeyLimits
    own: Mapping[str, KeyLimits]
    """By the key's digest."""
    retry_after: int
    _active: Counter[str] = field(default_factory=Counter)
    _used: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Tokens that count at a time; they fade by the limit every minute."""

    def of(self, owner: str) -> KeyLimits:
        return self.own.get(owner, self.default)

    def enter(self, owner: str) -> None:
        """Raises ApiError for one request too many of the key, or for tokens that it has used up."""
        limits = self.of(owner)
        if limits.requests is not None and self._active[owner] >= limits.requests:
            message = f"{limits.requests} requests of this key are under way, which is all at once: try later"
            raise too_many(self.retry_after, message)
        if limits.tokens is not None:
            over = self._tokens(owner, limits.tokens) - limits.tokens
            if over >= 0:
                wait = max(self.retry_after, math.ceil(over / limits.tokens * 60))
                raise too_many(wait, f"this key has used its {limits.tokens} tokens a minute: try later")
        self._active[owner] += 1

    def leave(self, owner: str) -> None:
        self._active[owner] -= 1
        if not self._active[owner]:
            del self._active[owner]

    def charge(self, owner: str, tokens: int) -> None:
        """Count tokens that a request of the key has taken."""
        limit = self.of(owner).tokens
        if limit is not None:
            self._used[owner] = (self._tokens(owner, limit) + tokens, time.monotonic())

    def check_priority(self, owner: str, priority: int) -> None:
        """Raises ApiError for a request that is more urgent than the key allows."""
        most = self.of(owner).priority
        if priority < most:
            message = f"priority is {priority}, and {most} is the most urgent that this key may ask for"
            raise ApiError(400, message, "priority")

    def _tokens(self, owner: str, limit: int) -> float:
        used, when = self._used.get(owner, (0.0, 0.0))
        return max(0.0, used - max(0.0, time.monotonic() - when) * limit / 60)


_LARGEST = 8
_PAUSE = 0.005
"""Seconds for others between two large bodies, which are read one after the other."""
prompt_log = logging.getLogger(PROMPT_LOG)


class Limiter:
    """Counts the requests under way, and lets none in any more once it is shut. Lives in one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.concurrency
        self._retry_after = settings.retry_after
        own = {digest(key): limits for key, limits in settings.own_limits.items()}
        self.quotas = Quotas(settings.key_limits, own, settings.retry_after)
        self.active = 0
        self.entered = 0
        """Requests that were let in since the start."""
        self.shut = False

    def enter(self, owner: str) -> None:
        """Raises ApiError for one request too many, of all or of its key, or too late."""
        if self.shut:
            raise unavailable(self._retry_after)
        if self.active >= self._limit:
            raise too_many(self._retry_after, f"{self._limit} requests are under way, which is all at once: try later")
        self.quotas.enter(owner)
        self.active += 1
        self.entered += 1

    def leave(self, owner: str) -> None:
        self.quotas.leave(owner)
        self.active -= 1


class Admission:
    """ASGI middleware: a POST is counted by the limiter. Other methods, as for health, are never held up."""

    def __init__(self, app: ASGIApp, limiter: Limiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        owner = scope["state"]["tenant"]
        try:
            self._limiter.enter(owner)
        except ApiError as error:
            return await error.response(scope["path"])(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        finally:
            self._limiter.leave(owner)


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
