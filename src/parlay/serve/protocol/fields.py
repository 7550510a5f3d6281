"""Types of fields of bodies."""

from __future__ import annotations

from pydantic import BeforeValidator

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
