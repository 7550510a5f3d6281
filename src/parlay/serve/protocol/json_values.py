"""Integers, texts of a pattern, and free-form JSON in bodies."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import from_json

_FEW = 64


def _whole(value: object) -> object:
    """Accept ``3.0`` as an integer, as JSON does and pydantic's strict mode does not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(value: object) -> object:
    """Apply `_whole` to a list of ids. A long list is not looked through, as no client writes ids as floats there."""
    return list(map(_whole, value)) if isinstance(value, list) and len(value) <= _FEW else value


def in_words(wanted: str) -> WrapValidator:
    """Say what is ``wanted`` of a text whose pattern, which stands before this, does not match: a client should not
    have to read a regular expression."""

    def check(value: object, match: ValidatorFunctionWrapHandler) -> object:
        try:
            return match(value)
        except ValidationError as error:
            if error.errors()[0]["type"] == "string_pattern_mismatch":
                raise ValueError(wanted) from None
            raise

    return WrapValidator(check)


TokenKey = Annotated[
    str,
    Field(pattern="^(0|[1-9][0-9]{0,8})$"),
    in_words('a key must be a token id in digits, as "50256" and not "050256"'),
]
"""A key of an object that stands for a token."""

WHOLE = BeforeValidator(_whole)
"""Place it after the bounds of an integer; otherwise the OpenAPI document would lack them."""

ALL_WHOLE = BeforeValidator(_all_whole)
"""`WHOLE` for a list of integers."""

_SEEDS = range(-(2**63), 2**64)


def _check_seed(seed: int) -> int:
    if seed not in _SEEDS:
        raise ValueError(f"must be a whole number from {_SEEDS[0]} to {_SEEDS[-1]}, got {seed!s:.60}")
    return seed


Seed = Annotated[int, AfterValidator(_check_seed), WHOLE]
"""A seed of any API: each takes the seeds that replies tell. OpenAPI documents would show its bounds as floats."""


MOST_LEVELS = 100
"""Code that later reads the value recursively can handle a few more levels than this."""
MOST_VALUES = 100_000
"""A limit at which reading all values does not delay other requests noticeably."""

T = TypeVar("T")


def check_plain(value: T) -> T:
    """Return free-form JSON if it can be sent back and is not too large.

    Raises ValueError for more than `MOST_LEVELS` levels, more than `MOST_VALUES` values, and infinite numbers or NaN.
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
    """Parse JSON that a client or a model has written.

    Raises ValueError for invalid JSON, half surrogate pairs, and what `check_plain` refuses.
    """
    return check_plain(from_json(text, cache_strings=False))


def without_nulls(data: Any) -> Any:
    """Remove fields that are null, as null means the same as leaving a field out. For validators of a whole body."""
    return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data
