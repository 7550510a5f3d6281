"""Who may ask, and for how much: API keys, host names, tenants, and their requests, tokens and urgency."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from parlay.serve.errors import ApiError, too_many, unavailable
from parlay.serve.settings import KeyLimits, Settings

OPEN = frozenset({"/", "/health", "/v1/health", "/ping", "/ready", "/identity", "/version", "/openapi.json"})
"""Paths that need no key to be read, like the files of the page: they reveal nothing of requests and run no model.

Whoever sends a body needs a key there too: it would take memory, and the place of a request.
`/identity` reads the first model's weights, once in the life of the process.
"""
_PAGE = "/page/"
_HOST = re.compile(r"(?P<name>\[[^\]]*\]|[^:]*)(:[0-9]+)?")


class Guard:
    """ASGI middleware that turns a request away before a byte of its body is read. What is not `OPEN` is guarded."""

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
        """Turn pages of other sites away where nothing but the host's name guards what they might do.

        They can't read answers, but an image whose address loads a model would do harm enough.
        """
        headers = Headers(scope=scope)
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")  # another port is the same site
        named = "*" in self._origins or headers.get("origin") in self._origins
        if self._hosts and foreign and not named and not _is_open(scope):
            raise ApiError(403, "pages of other sites may not use this server: see --cors-origin", code="foreign_site")

    def _tenant(self, scope: Scope) -> str:
        """The digest of the request's key. Raises ApiError where one is due and none of ours is there."""
        if not self._digests:
            return ""
        sent = _key_digest(Headers(scope=scope))
        # All are compared, each in constant time, so that the time taken says nothing.
        if sum([hmac.compare_digest(sent, digest) for digest in self._digests]):
            return sent
        if _is_open(scope) or _is_preflight(scope):
            return ""
        message = "a valid API key is needed: send it as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _is_open(scope: Scope) -> bool:
    """Whether anybody may ask this."""
    known = scope["path"] in OPEN or scope["path"].startswith(_PAGE)
    return known and scope["method"] in ("GET", "HEAD") and not _sends(Headers(scope=scope))


def _sends(headers: Headers) -> bool:
    """Whether a body comes with the request."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _is_preflight(scope: Scope) -> bool:
    """Whether a browser asks what a page may send: that question never carries a key, and what answers it runs nothing.

    It matters at a gateway, whose replicas answer it.
    """
    headers = Headers(scope=scope)
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers and not _sends(headers)


def _key_digest(headers: Headers) -> str:
    """The digest of the key in a request, as OpenAI's and Ollama's clients send it, or Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return digest(key.strip())
    return digest(headers["x-api-key"].strip()) if "x-api-key" in headers else ""


def digest(key: str) -> str:
    """The hash by which a key is known. The key itself is not kept."""
    return hashlib.sha256(key.encode()).hexdigest()


def tenant(request: Request, cache_salt: str | None = None) -> str:
    """Whose cached prefixes and stores this request shares: its key's, further divided by the body's ``cache_salt``.

    Both are there as digests, so no salt makes one tenant pass for another, or for one with an adapter.
    """
    owner: str = request.state.tenant
    return f"{owner}:{digest(cache_salt)}" if cache_salt else owner


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
