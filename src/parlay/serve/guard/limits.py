"""How much a client may ask for: requests at once, bytes of a body, tokens and samples of a request."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parlay.serve.errors import ApiError, too_many, unavailable
from parlay.serve.guard.auth import digest
from parlay.serve.guard.quotas import Quotas
from parlay.serve.guard.reading import check_readable
from parlay.serve.settings import PROMPT_LOG, Settings
from parlay.types import SamplingParams

_LIGHT = 32 * 1024
"""Bytes up to which a body is read at once; larger ones one after the other, with a pause for others between two."""
_PAUSE = 0.005
LEAST_TEMPERATURE = 1e-6  # below it, scaled logits overflow
prompt_log = logging.getLogger(PROMPT_LOG)


class Gate:
    """Counts the requests under way, and lets none in any more once it is shut. Lives in one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.concurrency
        self._retry_after = settings.retry_after
        own = {digest(key): limits for key, limits in settings.own_limits.items()}
        self.quotas = Quotas(settings.key_limits, own, settings.retry_after)
        self.active = 0
        self.shut = False

    def enter(self, owner: str) -> None:
        """Raises ApiError for one request too many, of all or of its key, or too late."""
        if self.shut:
            raise unavailable(self._retry_after)
        if self.active >= self._limit:
            raise too_many(self._retry_after, f"{self._limit} requests are under way, which is all at once: try later")
        self.quotas.enter(owner)
        self.active += 1

    def leave(self, owner: str) -> None:
        self.quotas.leave(owner)
        self.active -= 1


class Admission:
    """ASGI middleware: a POST goes through the gate. Other methods, as for health, are never held up."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        owner = scope["state"]["tenant"]
        try:
            self._gate.enter(owner)
        except ApiError as error:
            return await error.response(scope["path"])(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave(owner)


class BodyLimit:
    """ASGI middleware that reads the whole body, counting it, before the application runs."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._limit = settings.max_body_bytes
        self._timeout = settings.body_timeout
        self._log_prompts = settings.log_prompts
        self._large = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            self._check_announced(Headers(scope=scope).get("content-length", ""))
            async with asyncio.timeout(self._timeout):
                body = await self._read(receive)
            check_readable(body or b"")
        except ApiError as error:
            return await error.response(scope["path"])(scope, receive, send)
        except TimeoutError:
            late = ApiError(408, f"the body took more than {self._timeout:g} seconds to arrive", code="timeout")
            return await late.response(scope["path"])(scope, receive, send)
        if body is None:
            return  # the client is gone
        if len(body) > _LIGHT:
            async with self._large:
                await asyncio.sleep(_PAUSE)
        if self._log_prompts and body:
            prompt_log.info("%s %s", scope["path"], body.decode(errors="backslashreplace"))
        scope.setdefault("state", {})["body_bytes"] = len(body)
        await self._app(scope, _replay(body, receive), send)

    def _check_announced(self, length: str) -> None:
        if length.isdecimal() and int(length[:20]) > self._limit:
            raise self._too_large()

    async def _read(self, receive: Receive) -> bytes | None:
        """None when the client leaves first. Raises ApiError at the first byte too many."""
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._limit:
                raise self._too_large()
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


# ------------------------------------------------------------------------------------------------- of one request


def limit_params(params: SamplingParams, settings: Settings) -> SamplingParams:
    """The parameters, with the server's ``max_tokens`` where the request names none.

    Raises ApiError for more samples or tokens than the server gives one request, and for a temperature too close to 0.
    """
    if 0 < params.temperature < LEAST_TEMPERATURE:
        raise ApiError(400, f"temperature must be 0 or at least {LEAST_TEMPERATURE:g}", "temperature")
    if params.n > settings.max_n:
        raise ApiError(400, f"n is {params.n}, and this server gives {settings.max_n} at most", "n")
    most = settings.max_tokens
    for field, asked in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
        if most is not None and asked is not None and asked > most:
            raise ApiError(400, f"{field} is {asked}, and this server gives {most} at most", field)
    return params if params.max_tokens is not None else replace(params, max_tokens=most)


def check_prompt(tokens: int, settings: Settings, param: str = "prompt") -> None:
    """Raises ApiError for a prompt of more tokens than the server reads; the model's own limit is checked elsewhere."""
    limit = settings.max_prompt_tokens
    if limit is not None and tokens > limit:
        message = f"the {param} has {tokens} tokens, and this server takes {limit} at most: shorten it"
        raise ApiError(400, message, param, "context_length_exceeded")
