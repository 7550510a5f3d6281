"""Limits the size and content of bodies, and reads their JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parlay.serve.errors import ApiError, too_many
from parlay.serve.guard.workers import LIGHT_BYTES
from parlay.serve.settings import PROMPT_LOG, Settings

_LARGEST = 8
_PAUSE = 0.005
"""Pause in seconds between two large bodies, which are read one after the other."""
prompt_log = logging.getLogger(PROMPT_LOG)
MOST_CONTAINERS = 2**15
MOST_STRINGS = 2**15
MOST_VALUES = 2**18
"""Most lists and objects of a body, strings (including field names), and values in all. Parsing and validating that
many takes about 50 ms, during which the server answers nobody. Only bytes are counted, so brackets and quotes within
strings count, too."""

_FORM = b"application/x-www-form-urlencoded"
_OF_PAGES = frozenset({b"origin", b"sec-fetch-site"})
"""Headers that only browsers send."""
MOST_LEVELS = 200
"""The parser's own limit of nesting."""

_REASONS = {
    "recursion limit exceeded": f"it has more than {MOST_LEVELS} levels",
    "hex escape": "it holds half of a surrogate pair, which is no character",
    "invalid unicode code point": "it holds bytes that are not UTF-8",
}
"""Clearer texts for some of the parser's messages."""


@dataclass(slots=True)
class BodyBytes:
    """Counts the bytes of bodies under way, at most ``most`` in all; one owner among several may use half. All calls
    belong to one event loop.

    A request holds its texts and ids while it runs, about ten times the size of its body.
    """

    most: int
    _used: Counter[str] = field(default_factory=Counter)

    def take(self, owner: str, size: int) -> None:
        """Count ``size`` bytes. Raises ApiError if there is no room."""
        share = self.most // 2 if owner else self.most
        if self._used.total() + size > self.most or self._used[owner] + size > share:
            raise too_many(1, f"large requests of {share} bytes are under way, which is all at once: try again later")
        self._used[owner] += size

    def give_back(self, owner: str, size: int) -> None:
        self._used[owner] -= size
        if not self._used[owner]:
            del self._used[owner]


class BodyLimit:
    """ASGI middleware that reads and counts the whole body before the application runs.

    Bodies above `LIGHT_BYTES` together get `_LARGEST` times the size of the largest allowed body.
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
            return  # the client has gone
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
        """Read the body; None if the client leaves first. Raises ApiError as soon as it is too large."""
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
    """Receive the body as one message, then the client's next messages."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def check_readable(body: bytes) -> None:
    """Raises ApiError for a body with too many values to be parsed."""
    containers = body.count(b"[") + body.count(b"{")
    _check(containers, MOST_CONTAINERS, "lists and objects")
    _check(containers + body.count(b","), MOST_VALUES, "values")
    _check((body.count(b'"') - body.count(b'\\"') + 1) // 2, MOST_STRINGS, "strings")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        message = f"the body can't be read: it holds some {count} {what}, and the limit is {most}: send less"
        raise ApiError(400, message)


class JsonRequest(Request):
    async def json(self) -> Any:
        value = read_json(await self.body())
        await asyncio.sleep(0)  # lets others run before the value is validated, which takes as long again
        return value


def as_json(scope: Scope) -> Scope:
    """Mark the request as JSON, as some clients don't, and curl calls it a form. A web page of another origin could
    send JSON in this way, too, but its requests carry an Origin, and are left as they are."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    types = {value.lower() for name, value in headers if name == b"content-type"}
    if types - {_FORM} or any(name in _OF_PAGES for name, _ in headers):
        return scope
    others = [(name, value) for name, value in headers if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def read_json(body: bytes) -> Any:
    """Parse JSON three times as fast as the standard library, and strictly about text. Raises JSONDecodeError for
    invalid JSON."""
    try:
        return from_json(body.removeprefix(b"\xef\xbb\xbf"), cache_strings=False)
    except ValueError as error:
        reason = str(error)
        raise json.JSONDecodeError(
            next((plain for part, plain in _REASONS.items() if part in reason), reason), "", 0
        ) from None
