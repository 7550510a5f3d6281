"""Strategies in which drafters stand inside drafters."""

from __future__ import annotations

from parlay.drafters.entries import Entry

ENTRIES: tuple[Entry, ...] = ()
