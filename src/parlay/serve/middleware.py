"""ASGI middleware, in the order in which a request passes it: it is timed, allowed and let in, and its body is read."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parlay.serve.errors import ApiError, too_many
from parlay.serve.guard.auth import Limiter, digest
from parlay.serve.guard.connection import PARTS, Parts
from parlay.serve.guard.workers import LIGHT_BYTES
from parlay.serve.settings import PROMPT_LOG, Settings

prompt_log = logging.getLogger(PROMPT_LOG)

PROBES = frozenset({"/health", "/ping", "/ready", "/load", "/metrics", "/version"})
"""Paths that machines poll all the time; they are not counted, and logged only at level debug."""
OPEN = frozenset({"/", "/health", "/v1/health", "/ping", "/ready", "/identity", "/version", "/openapi.json"})
"""Paths that need no key for reading, like the page's files: they show nothing about requests and run no model.

A request with a body needs a key there, too, as it takes memory and counts as a request. `/identity` reads the first
model's weights, once in the life of the process.
"""
_PAGE = "/page/"
_HOST = re.compile(r"(?P<name>\[[^\]]*\]|[^:]*)(:[0-9]+)?")
_FOREIGN = (b"cross-site", b"same-site")
"""What a browser says in `Sec-Fetch-Site` of a page of another site; another port counts as the same site."""
_NOTHING = "none"
_LARGEST = 8
_PAUSE = 0.005
"""Pause in seconds between two large bodies, which are read one after the other."""
MOST_CONTAINERS = 2**15
MOST_STRINGS = 2**15
MOST_VALUES = 2**18
"""Most lists and objects of a body, strings (including field names), and values in all. Parsing and validating that
many takes about 50 ms, during which the server answers nobody. Only bytes are counted, so brackets and quotes within
strings count, too."""
_FEWEST = min(MOST_CONTAINERS, MOST_STRINGS, MOST_VALUES)
"""A body of so few bytes is within each of these limits."""


class HttpMetrics:
    """Tells of each request when its answer has been sent: method, path of the route, status, seconds."""

    def __init__(self, app: ASGIApp, answered: Callable[[str, str, int, float], None]) -> None:
        self._app = app
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            return await self._app(scope, receive, send)
        began, status = time.monotonic(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if status:
                self._answered(*_route(scope), status, max(0.0, time.monotonic() - began))


def _route(scope: Scope) -> tuple[str, str]:
    """Method and path of the request's route."""
    route = scope.get("route")
    if route is None:
        return _NOTHING, _NOTHING
    return scope["method"] if scope["method"] in route.methods else _NOTHING, route.path


class Guard:
    """Turns a request away before a byte of its body is read. It guards all paths that are not in `OPEN`."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._digests = [digest(key) for key in settings.keys]
        self._hosts = frozenset(host.lower() for host in settings.hosts)
        self._origins = frozenset(settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            self._check_host([value.decode("latin-1") for name, value in scope["headers"] if name == b"host"])
            scope.setdefault("state", {})["tenant"] = self._tenant(scope)
            self._check_site(scope)
        except ApiError as error:
            return await error.response(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)

    def _check_host(self, headers: list[str]) -> None:
        if len(headers) > 1:
            raise ApiError(400, "the request has two Host headers: send one")
        named = _HOST.fullmatch(headers[0] if headers else "")
        if self._hosts and (named is None or named["name"].lower() not in self._hosts):
            allowed = ", ".join(sorted(self._hosts))
            raise ApiError(403, f"this server answers under these names only: {allowed}", code="unknown_host")

    def _check_site(self, scope: Scope) -> None:
        """Refuse requests from pages of other sites if only the host's name protects the server.

        Such pages can't read answers, but an image whose address loads a model would do harm enough.
        """
        if not self._hosts or _first(scope, b"sec-fetch-site") not in _FOREIGN:
            return
        named = "*" in self._origins or _first(scope, b"origin").decode("latin-1") in self._origins
        if not named and not _is_open(scope):
            raise ApiError(403, "pages of other sites may not use this server: see --cors-origin", code="foreign_site")

    def _tenant(self, scope: Scope) -> str:
        """The hash of the request's key. Raises ApiError if a key is required and the request has no valid one."""
        if not self._digests:
            return ""
        sent = _key_digest(Headers(scope=scope))
        # All keys are compared, each in constant time, so that timing reveals nothing.
        if sum([hmac.compare_digest(sent, digest) for digest in self._digests]):
            return sent
        if _is_open(scope) or _is_preflight(scope):
            return ""
        message = "a valid API key is needed: send it as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _first(scope: Scope, name: bytes) -> bytes:
    """Return the first header of this name; empty if there is none. It is looked up so for every request, because
    Starlette's `Headers` takes several times as long."""
    for own, value in scope["headers"]:
        if own == name:
            return bytes(value)
    return b""


def _is_open(scope: Scope) -> bool:
    """Whether the request needs no key."""
    known = scope["path"] in OPEN or scope["path"].startswith(_PAGE)
    return known and scope["method"] in ("GET", "HEAD") and not _sends(Headers(scope=scope))


def _sends(headers: Headers) -> bool:
    """Whether the request has a body."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _is_preflight(scope: Scope) -> bool:
    """Whether this is a browser's CORS preflight, which never carries a key, and whose answer runs nothing.

    It matters at a gateway, where replicas answer it.
    """
    headers = Headers(scope=scope)
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers and not _sends(headers)


def _key_digest(headers: Headers) -> str:
    """The hash of the request's key, from the header of OpenAI's and Ollama's clients or that of Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return digest(key.strip())
    return digest(headers["x-api-key"].strip()) if "x-api-key" in headers else ""


class Admission:
    """A POST is counted by the limiter. Other methods, such as health checks, always pass."""

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


class BodyLimit:
    """Reads the whole body, counting it, before the application runs.

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
        state = scope.setdefault("state", {})
        owner, taken = state.get("tenant", ""), list[int]()
        try:
            try:
                body = await self._timed(scope, receive, owner, taken)
            except ApiError as error:
                return await error.response(scope["path"])(scope, receive, send)
            if body is None:
                return  # the client is gone
            if len(body) > LIGHT_BYTES:
                async with self._large:
                    await asyncio.sleep(_PAUSE)
            if self._log_prompts and body:
                prompt_log.info("%s %s", scope["path"], body.decode(errors="backslashreplace"))
            state["body_bytes"] = len(body)
            await self._app(scope, _replay(body, receive), send)
        finally:
            if taken:
                self._bytes.give_back(owner, sum(taken))

    async def _timed(self, scope: Scope, receive: Receive, owner: str, taken: list[int]) -> bytes | None:
        """Read the body within the time limit, which one that has come does not need; None if the client leaves first.
        Adds to ``taken`` the bytes that it counts for the owner. Raises ApiError."""
        self._check_announced(_first(scope, b"content-length"))
        parts: Parts | None = scope["state"].get(PARTS)
        if parts is not None and parts.asked:
            body = await self._read(receive, owner, taken)
        else:
            try:
                async with asyncio.timeout(self._timeout):
                    body = await self._read(receive, owner, taken)
            except TimeoutError:
                late = f"the body took more than {self._timeout:g} seconds to arrive"
                raise ApiError(408, late, code="timeout") from None
        check_readable(body or b"")
        return body

    def _check_announced(self, length: bytes) -> None:
        if length.isdigit() and int(length[:20]) > self._limit:
            raise self._too_large()

    async def _read(self, receive: Receive, owner: str, taken: list[int]) -> bytes | None:
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
                self._bytes.take(owner, len(body) - counted)
                taken.append(len(body) - counted)
                counted = len(body)
            more = message.get("more_body", False)
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than this server's limit of {self._limit} bytes: send less")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Receive the body as one message, then the client's next messages."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


@dataclass(slots=True)
class BodyBytes:
    """Counts the bytes of bodies under way, at most ``most`` in all; one owner among several may use half. Lives in one
    event loop.

    A request holds its texts and ids while it runs, about ten times the size of its body.
    """

    most: int
    _used: Counter[str] = field(default_factory=Counter)

    def take(self, owner: str, size: int) -> None:
        """Count ``size`` bytes. Raises ApiError if there is no room."""
        share = self.most // 2 if owner else self.most
        if self._used.total() + size > self.most or self._used[owner] + size > share:
            raise too_many(
                1, f"large requests of {share} bytes are under way, which is this server's limit: try again later"
            )
        self._used[owner] += size

    def give_back(self, owner: str, size: int) -> None:
        self._used[owner] -= size
        if not self._used[owner]:
            del self._used[owner]


def check_readable(body: bytes) -> None:
    """Raises ApiError for a body with too many values to be parsed."""
    if len(body) <= _FEWEST:
        return
    containers = body.count(b"[") + body.count(b"{")
    _check(containers, MOST_CONTAINERS, "lists and objects")
    _check(containers + body.count(b","), MOST_VALUES, "values")
    _check((body.count(b'"') - body.count(b'\\"') + 1) // 2, MOST_STRINGS, "strings")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        message = f"the body can't be read: it holds some {count} {what}, and the limit is {most}: send less"
        raise ApiError(400, message)
