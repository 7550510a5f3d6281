"""Plain decoding."""

from __future__ import annotations

from parlay.strategies.entry import StrategyEntry

ENTRIES = (
    StrategyEntry(
        name="none",
        family="plain",
        training="none",
        needs="nothing",
        summary="Plain decoding: one token per step. The yardstick.",
        when="drafting can not pay: high load, or text that nothing foretells",
    ),
)
