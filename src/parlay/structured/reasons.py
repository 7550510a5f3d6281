"""Failures of llguidance in words, for users."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SHOWN = 300
_PICTURE = re.compile(r"\s*(\d+ \||\|?\s*\^+\s*$)")
"""A line that quotes what was written, or points into it."""


def in_one_line(reason: str) -> str:
    """Without its dump of the parser's state, its picture of the place, and what it says of a fault of its own."""
    lines = reason.partition("<state>")[0].splitlines()
    told = " ".join(" ".join(line for line in lines if not _PICTURE.match(line)).split())
    if "panic" in told.partition(":")[0]:
        return "this is more than its compiler can hold"
    return told if len(told) <= _SHOWN else told[:_SHOWN] + "..."


def limit_reached(matcher: LLMatcher) -> str | None:
    """Which limit of the library a matcher has failed at; None for one that goes on, has ended, or is at a dead end."""
    reason = matcher.get_error() if matcher.is_error() else ""
    return None if not reason or reason.startswith("NoExtension") else in_one_line(reason)
