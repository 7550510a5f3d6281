"""Types of fields of bodies."""

from __future__ import annotations

from pydantic import BeforeValidator

MOST_IDS = 2**19


def _whole(value: object) -> object:
    """``3.0`` is an integer in JSON; pydantic's strict mode thinks otherwise."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(value: object) -> object:
    """`_whole` for a list that may be long: one without such numbers is not looked at one by one.

    Raises ValueError for one that is longer than any model takes, before anything else looks at it.
    """
    if isinstance(value, list) and len(value) > MOST_IDS:
        raise ValueError(f"holds {len(value)} token ids, and the limit is {MOST_IDS}")
    return list(map(_whole, value)) if isinstance(value, list) and float in set(map(type, value)) else value


WHOLE = BeforeValidator(_whole)
"""Stands after the bounds of an integer, or the document would not tell them."""

ALL_WHOLE = BeforeValidator(_all_whole)
"""The same for a list of integers."""
