"""Strategies that retrieve from a corpus."""

from __future__ import annotations

from parlay.drafters.entries import Entry

ENTRIES: tuple[Entry, ...] = ()
