"""Whose a request is, and for how much its key may ask: requests, tokens and urgency."""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from parlay.serve.errors import ApiError, too_many, unavailable
from parlay.serve.settings import KeyLimits, Settings


def digest(key: str) -> str:
    """The hash by which a key is known; keys themselves are not kept."""
    return hashlib.sha256(key.encode()).hexdigest()


def tenant(request: Request, cache_salt: str | None = None) -> str:
    """The tenant with which a request shares cached prefixes and stores: its key's, subdivided by the body's
    ``cache_salt``.

    Both are hashed, so no salt can imitate another tenant or one with an adapter.
    """
    owner: str = request.state.tenant
    return f"{owner}:{digest(cache_salt)}" if cache_salt else owner


@dataclass(slots=True)
class Quotas:
    """Quotas by key: ``own`` are those of single keys, ``default`` those of all others. All calls belong to one event
    loop."""

    default: KeyLimits
    own: Mapping[str, KeyLimits]
    """Limits by the key's hash."""
    retry_after: int
    _active: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _used: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Tokens used lately and when they were counted, by key; they decay by the limit each minute."""

    def of(self, owner: str) -> KeyLimits:
        return self.own.get(owner, self.default)

    def enter(self, owner: str) -> None:
        """Count a request of the key. Raises ApiError if it has too many under way or has used up its tokens."""
        limits = self.of(owner)
        if limits.requests is not None and self._active[owner] >= limits.requests:
            message = f"{limits.requests} requests of this key are under way, which is its limit: try again later"
            raise too_many(self.retry_after, message)
        if limits.tokens is not None:
            over = self._tokens(owner, limits.tokens) - limits.tokens
            if over >= 0:
                wait = max(self.retry_after, math.ceil(over / limits.tokens * 60))
                raise too_many(wait, f"this key has used its {limits.tokens} tokens a minute: try again later")
        self._active[owner] += 1

    def leave(self, owner: str) -> None:
        self._active[owner] -= 1
        if not self._active[owner]:
            del self._active[owner]

    def charge(self, owner: str, tokens: int) -> None:
        """Charge tokens that a request of the key has used."""
        limit = self.of(owner).tokens
        if limit is not None:
            self._used[owner] = (self._tokens(owner, limit) + tokens, time.monotonic())

    def check_priority(self, owner: str, priority: int) -> None:
        """Raises ApiError if the request's priority is higher than the key allows."""
        most = self.of(owner).priority
        if priority < most:
            message = f"priority is {priority}, and {most} is the most urgent that this key may ask for"
            raise ApiError(400, message, "priority")

    def _tokens(self, owner: str, limit: int) -> float:
        used, when = self._used.get(owner, (0.0, 0.0))
        return max(0.0, used - max(0.0, time.monotonic() - when) * limit / 60)


class Limiter:
    """Counts the requests under way, and refuses all once it is shut. All calls belong to one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.concurrency
        self._retry_after = settings.retry_after
        own = {digest(key): limits for key, limits in settings.own_limits.items()}
        self.quotas = Quotas(settings.key_limits, own, settings.retry_after)
        self.active = 0
        self.entered = 0
        """Requests admitted since the start."""
        self.shut = False

    def enter(self, owner: str) -> None:
        """Admit a request. Raises ApiError if too many are under way, in all or of its key, or if the server is
        shutting down."""
        if self.shut:
            raise unavailable(self._retry_after)
        if self.active >= self._limit:
            raise too_many(
                self._retry_after,
                f"{self._limit} requests are under way, which is this server's limit: try again later",
            )
        self.quotas.enter(owner)
        self.active += 1
        self.entered += 1

    def leave(self, owner: str) -> None:
        self.quotas.leave(owner)
        self.active -= 1
