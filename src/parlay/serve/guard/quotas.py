"""What one API key may ask for: requests at once, tokens a minute, urgency."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from parlay.serve.errors import ApiError, too_many
from parlay.serve.settings import KeyLimits


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
