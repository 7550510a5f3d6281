"""Free-form JSON, of a body or written as text inside one: what may be looked through, and sent on as JSON."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from pydantic_core import from_json

MOST_LEVELS = 100
"""Everything that reads it recursively later on can read a few more levels than this."""
MOST_VALUES = 100_000
"""So that reading all of them does not delay other requests noticeably."""

T = TypeVar("T")


def check_plain(value: T) -> T:
    """Free-form JSON may hold numbers that can't be sent back, and more than anyone wants to look at.

    Raises ValueError for what lies deeper than `MOST_LEVELS`, for more than `MOST_VALUES`, and for numbers without end.
    """
    level: list[Any] = [value]
    values = depth = 0
    while level:
        if not all(math.isfinite(item) for item in level if isinstance(item, float)):
            raise ValueError("holds NaN or infinity, which are no JSON")
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
        values, depth = values + len(level), depth + 1
        if values > MOST_VALUES or (level and depth > MOST_LEVELS):
            raise ValueError(f"holds more than {MOST_LEVELS} levels or {MOST_VALUES} values")
    return value


def read_value(text: str) -> Any:
    """The value of JSON that a client or a model has written.

    Raises ValueError for what is none, for halves of surrogate pairs, and for what `check_plain` refuses.
    """
    return check_plain(from_json(text, cache_strings=False))
