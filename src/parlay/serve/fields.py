"""Types of fields of bodies."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator


def _whole(value: object) -> object:
    """``3.0`` is an integer in JSON; pydantic's strict mode thinks otherwise."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
"""For strict models: ``3`` and ``3.0``, neither ``"3"`` nor ``true``."""
