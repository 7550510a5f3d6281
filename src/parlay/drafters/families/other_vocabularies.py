"""Strategies whose draft model has another tokenizer."""

from __future__ import annotations

from parlay.drafters.entries import Entry

ENTRIES: tuple[Entry, ...] = ()
