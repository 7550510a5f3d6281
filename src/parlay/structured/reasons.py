"""What llguidance says of a failure, for users."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SHOWN = 300


def in_one_line(reason: str) -> str:
    """Without its dump of the parser's state, and without what it says of a fault of its own."""
    told = " ".join(reason.partition("<state>")[0].split())
    if "panic" in told.partition(":")[0]:
        return "this is more than its compiler can hold"
    return told if len(told) <= _SHOWN else told[:_SHOWN] + "..."


def limit_reached(matcher: LLMatcher) -> str | None:
    """Which limit of the library a matcher has failed at; None for one that goes on, has ended, or is at a dead end."""
    reason = matcher.get_error() if matcher.is_error() else ""
    return None if not reason or reason.startswith("NoExtension") else in_one_line(reason)
