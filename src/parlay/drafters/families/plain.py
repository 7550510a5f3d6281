"""Plain decoding."""

from __future__ import annotations

from parlay.drafters.entries import Entry
from parlay.types import Exactness

ENTRIES = (
    Entry(
        name="none",
        family="plain",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing",
        summary="Plain decoding: one token per step. The yardstick.",
        when="drafting can not pay: high load, or text that nothing foretells",
        reference="",
    ),
)
