"""Plain decoding."""

from __future__ import annotations

from parlay.strategies.entry import StrategyEntry

ENTRIES = (
    StrategyEntry(
        name="none",
        family="plain",
        training="none",
        needs="nothing",
        summary="Plain decoding: one token per step. All others are compared with it.",
        when="drafting can't pay: high load, or text that nothing predicts",
    ),
)
