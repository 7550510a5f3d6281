"""The JSON of a body: how much of it a body may hold, and its values."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from parlay.serve.errors import ApiError

MOST_CONTAINERS = 2**15
MOST_STRINGS = 2**15
MOST_VALUES = 2**18
"""Most lists and objects of a body, strings with names of fields, and values in all. To read so many, and to look
whether they are what they should be, takes some 50 ms, in which the server answers nobody. What merely looks like
them inside a text counts too: only bytes are looked at."""
MOST_LEVELS = 200
"""The parser's own limit."""

_REASONS = {
    "recursion limit exceeded": f"it has more than {MOST_LEVELS} levels",
    "hex escape": "it holds half of a surrogate pair, which is no character",
    "invalid unicode code point": "it holds bytes that are not UTF-8",
}
"""Clearer words for some of the parser's messages."""


def check_readable(body: bytes) -> None:
    """Raises ApiError for a body that is too large to be parsed."""
    containers = body.count(b"[") + body.count(b"{")
    _check(containers, MOST_CONTAINERS, "lists and objects")
    _check(containers + body.count(b","), MOST_VALUES, "values")
    _check((body.count(b'"') - body.count(b'\\"') + 1) // 2, MOST_STRINGS, "strings")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        message = f"the body can't be read: it holds some {count} {what}, and the limit is {most}: send less"
        raise ApiError(400, message)


def read_json(body: bytes) -> Any:
    """Three times as fast as the standard library, and strict about text. Raises JSONDecodeError."""
    try:
        return from_json(body.removeprefix(b"\xef\xbb\xbf"), cache_strings=False)
    except ValueError as error:
        reason = str(error)
        raise json.JSONDecodeError(
            next((plain for part, plain in _REASONS.items() if part in reason), reason), "", 0
        ) from None
