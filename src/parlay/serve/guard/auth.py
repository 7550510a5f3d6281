"""Who may ask: API keys, host names, and the tenant whose cached prefixes a request may reuse."""

from __future__ import annotations

import hashlib
import hmac
import re

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from parlay.serve.errors import ApiError
from parlay.serve.settings import Settings

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
