"""Whole numbers and free-form JSON in bodies."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from pydantic import BeforeValidator
from pydantic_core import from_json

_FEW = 64


def _whole(value: object) -> object:
    """``3.0`` is an integer in JSON; pydantic's strict mode thinks otherwise."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(value: object) -> object:
    """`_whole` for a list of ids. Of a long one, which no client writes with such numbers, none is looked at."""
    return list(map(_whole, value)) if isinstance(value, list) and len(value) <= _FEW else value


WHOLE = BeforeValidator(_whole)
"""Stands after the bounds of an integer, or the document would not tell them."""

ALL_WHOLE = BeforeValidator(_all_whole)
"""The same for a list of integers."""


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


def without_nulls(data: Any) -> Any:
    """Leave out what is null: in all bodies it means the same as no field. For a validator of a whole body."""
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data
