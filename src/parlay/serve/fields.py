"""Types of fields of bodies."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator


def _whole(value: object) -> object:
    """``3.0`` is an integer in JSON; pydantic's strict mode thinks otherwise."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Stands after the bounds of an integer, or the document would not tell them."""

Integer = Annotated[int, WHOLE]
"""For strict models: ``3`` and ``3.0``, neither ``"3"`` nor ``true``."""
